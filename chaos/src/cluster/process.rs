//! A process of a cluster, which is started, killed and restarted at the same addresses over the
//! same folder. A child ends with the harness, even if the harness is killed with SIGKILL.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use super::ground::compose::Container;

/// Maximum time until a process reports that it is ready. A controller that joins waits for the
/// log.
const READY_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum time until a killed process has ended.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for an orderly end, longer than a process gives to requests under way.
const GRACE: Duration = Duration::from_secs(30);
/// Number of log lines that an error shows.
const LOG_LINES: usize = 12;

/// The instructions to start a process.
#[derive(Debug, Clone)]
pub(super) struct LaunchSpec {
    /// The name, such as `controller-1` or `worker-2`.
    pub(super) name: String,
    pub(super) how: LaunchMethod,
    /// The log file, to which the process appends.
    pub(super) log: PathBuf,
    /// The soft limit of descriptors of a child; `None` for the harness's own limit.
    pub(super) descriptors: Option<u64>,
}

/// The kind of a process.
#[derive(Debug, Clone)]
pub(super) enum LaunchMethod {
    /// A child of the harness.
    Child {
        /// The words before the program, such as programs that change its network and mounts.
        prefix: Vec<String>,
        program: PathBuf,
        /// The program's arguments.
        words: Vec<String>,
    },
    /// The first process of a container.
    Container(Container),
}

/// A running process.
#[derive(Debug)]
pub(super) struct RunningProcess {
    pub(super) pid: u32,
    life: ProcessHandle,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there are as many as processes")]
enum ProcessHandle {
    Child {
        child: Child,
        /// The child's standard output, kept open because the process may still write.
        _stdout: Lines<BufReader<ChildStdout>>,
    },
    Container(Container),
}

/// The result of a start.
#[derive(Debug)]
pub(super) enum LaunchResult {
    Ready(Box<RunningProcess>),
    /// The process ended by itself before it was ready.
    Ended(ExitStatus),
}

impl LaunchSpec {
    /// Starts the process and waits for its ready line or its end. `spawned` receives the pid
    /// before the process does anything, so that every connection of the process has a known owner.
    pub(super) async fn start(&self, spawned: impl FnOnce(u32)) -> anyhow::Result<LaunchResult> {
        let LaunchMethod::Child { prefix, program, words } = &self.how else {
            return self.start_container(spawned).await;
        };
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.with_context(|| format!("cannot open {}", self.log.display()))?;
        let mut before = prefix.iter().map(String::as_str);
        let first = before.next().map_or(program.as_path(), Path::new);
        let mut command = Command::new(first);
        if !prefix.is_empty() {
            command.args(before).arg(program);
        }
        // The user's own settings must not reach the cluster.
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", "/nonexistent");
        command.args(words).args(["--die-with", &std::process::id().to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).kill_on_drop(true);
        let spawned_child = {
            // A child inherits the limit that is in force when the child is started.
            let _lowered = self.descriptors.map(LoweredLimit::to).transpose()?;
            command.spawn()
        };
        let mut child = spawned_child.with_context(|| format!("cannot start {}", first.display()))?;
        spawned(child.id().context("a process that was just started has a pid")?);
        let stdout = child.stdout.take().context("stdout is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let first = tokio::time::timeout(READY_TIMEOUT, lines.next_line()).await;
        match first {
            Ok(Ok(Some(_ready))) => {
                let pid = child.id().context("a process that is ready has a pid")?;
                let life = ProcessHandle::Child { child, _stdout: lines };
                Ok(LaunchResult::Ready(Box::new(RunningProcess { pid, life })))
            }
            Ok(Ok(None)) => {
                let ended = tokio::time::timeout(END_TIMEOUT, child.wait()).await;
                let status = ended
                    .with_context(|| format!("{} closed its standard output and still runs", self.name))?;
                Ok(LaunchResult::Ended(status.context("a child can be waited for")?))
            }
            Ok(Err(error)) => {
                Err(error).with_context(|| format!("cannot read the standard output of {}", self.name))
            }
            Err(_) => bail!("{} is not ready after {READY_TIMEOUT:?}; {}", self.name, self.log_tail()),
        }
    }

    /// Returns the words before the program of a child.
    pub(super) fn prefix(&self) -> Vec<String> {
        match &self.how {
            LaunchMethod::Child { prefix, .. } => prefix.clone(),
            LaunchMethod::Container(_) => Vec::new(),
        }
    }

    async fn start_container(&self, spawned: impl FnOnce(u32)) -> anyhow::Result<LaunchResult> {
        let LaunchMethod::Container(container) = &self.how else { bail!("{} is no container", self.name) };
        match container.start().await.with_context(|| format!("{} does not start", self.name))? {
            Ok(pid) => {
                spawned(pid);
                let life = ProcessHandle::Container(container.clone());
                Ok(LaunchResult::Ready(Box::new(RunningProcess { pid, life })))
            }
            Err(status) => {
                // The caller shows the log if the end is an error.
                self.keep_log().await?;
                Ok(LaunchResult::Ended(status))
            }
        }
    }

    /// Writes a container's log to the file in which a child logs.
    pub(super) async fn keep_log(&self) -> anyhow::Result<()> {
        let LaunchMethod::Container(container) = &self.how else { return Ok(()) };
        let log = container.log().await?;
        std::fs::write(&self.log, log).with_context(|| format!("cannot write {}", self.log.display()))
    }

    /// Returns the end of the process's log, for a message.
    pub(super) fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let shown = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
        format!("its log ends with:\n{shown}")
    }
}

/// Returns the running process, or the end of the log as an error.
pub(super) fn must_run(recipe: &LaunchSpec, started: LaunchResult) -> anyhow::Result<RunningProcess> {
    match started {
        LaunchResult::Ready(running) => Ok(*running),
        LaunchResult::Ended(status) => bail!("{} ended ({status}); {}", recipe.name, recipe.log_tail()),
    }
}

/// A lowered soft limit of the harness's descriptors, which lasts until the value is dropped.
struct LoweredLimit(Rlimit);

impl LoweredLimit {
    fn to(limit: u64) -> anyhow::Result<Self> {
        let before = getrlimit(Resource::Nofile);
        let current = before.current.map_or(limit, |own| own.min(limit));
        let lowered = Rlimit { current: Some(current), ..before };
        setrlimit(Resource::Nofile, lowered).context("cannot lower the limit of descriptors")?;
        Ok(Self(before))
    }
}

impl Drop for LoweredLimit {
    fn drop(&mut self) {
        // A process may always raise its soft limit to its hard limit, which has not changed.
        let _raised = setrlimit(Resource::Nofile, self.0);
    }
}

impl RunningProcess {
    /// Kills the process with SIGKILL, and waits for its end.
    pub(super) async fn kill(self) -> anyhow::Result<()> {
        let mut child = match self.life {
            ProcessHandle::Child { child, .. } => child,
            ProcessHandle::Container(container) => return container.kill().await,
        };
        signal(self.pid, Signal::KILL)?;
        let ended = tokio::time::timeout(END_TIMEOUT, child.wait()).await;
        ended
            .with_context(|| format!("process {} still runs after kill -9", self.pid))?
            .context("a child can be waited for")?;
        Ok(())
    }

    /// Sends SIGTERM, and waits for the end of the process.
    pub(super) async fn end(self) -> anyhow::Result<ExitStatus> {
        let mut child = match self.life {
            ProcessHandle::Child { child, .. } => child,
            ProcessHandle::Container(container) => return container.end().await,
        };
        signal(self.pid, Signal::TERM)?;
        let ended = tokio::time::timeout(GRACE, child.wait()).await;
        ended
            .with_context(|| format!("process {} still runs {GRACE:?} after SIGTERM", self.pid))?
            .context("a child can be waited for")
    }

    /// Returns the exit status of a process that ended by itself. A container's engine restarts
    /// such a process, so for a container the result is always `None`.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        match &mut self.life {
            ProcessHandle::Child { child, .. } => child.try_wait().ok().flatten(),
            ProcessHandle::Container(_) => None,
        }
    }
}

/// Sends a signal to a process, which may have ended by itself.
pub(crate) fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let target = Pid::from_raw(pid.cast_signed()).context("a process id is positive")?;
    match kill_process(target, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot signal process {pid}")),
    }
}

/// Returns the descendants of a process, from /proc.
pub(crate) fn descendants(of: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> = texts
        .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    children.into_iter().flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

/// Whether a process runs. A zombie has ended, and only waits to be reaped.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Returns the pid of a process in its own namespace, which differs from the harness's view for a
/// container.
pub(crate) fn own_pid(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.and_then(|pids| pids.split_whitespace().next_back()?.parse().ok()).unwrap_or(pid)
}
