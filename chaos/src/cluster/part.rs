//! One process of a cluster: started, killed, started again at the same addresses over the same
//! folder. A child ends with the harness, kill -9 of that included.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use super::ground::Container;

/// How long a process may take until it says that it is ready: a controller that joins waits for
/// the log.
const READY_TIMEOUT: Duration = Duration::from_secs(90);
/// How long the end of a killed process may take.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a process may take to end that was asked to: longer than it gives requests under way.
const GRACE: Duration = Duration::from_secs(30);
/// Lines of a log shown where its process failed.
const LOG_LINES: usize = 12;

/// How to start a process.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    /// `controller-1`, `worker-2`.
    pub(super) name: String,
    pub(super) how: How,
    /// Where it logs to; appended.
    pub(super) log: PathBuf,
    /// The soft limit of descriptors that a child is started under; `None` for the harness's own.
    pub(super) descriptors: Option<u64>,
}

/// What a process is.
#[derive(Debug, Clone)]
pub(super) enum How {
    /// A child of the harness.
    Child {
        /// What stands before the program, such as programs that change its network and mounts.
        prefix: Vec<String>,
        program: PathBuf,
        /// The program's words.
        words: Vec<String>,
    },
    /// The first process of a container.
    Container(Container),
}

/// A process that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) pid: u32,
    life: Life,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there are as many as processes")]
enum Life {
    Child {
        child: Child,
        /// Kept open: the process may still write.
        _stdout: Lines<BufReader<ChildStdout>>,
    },
    Container(Container),
}

/// How a process ended that was to become ready.
#[derive(Debug)]
pub(super) enum Started {
    Ready(Box<Running>),
    /// It ended by itself first.
    Ended(ExitStatus),
}

impl Recipe {
    /// Starts it and waits for its ready line, or its end. `spawned` is told its pid before it does
    /// anything: what it connects to until it is ready is its own already.
    pub(super) async fn start(&self, spawned: impl FnOnce(u32)) -> anyhow::Result<Started> {
        let How::Child { prefix, program, words } = &self.how else {
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
            // A child inherits the limit of the moment in which it is started.
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
                let life = Life::Child { child, _stdout: lines };
                Ok(Started::Ready(Box::new(Running { pid, life })))
            }
            Ok(Ok(None)) => {
                let ended = tokio::time::timeout(END_TIMEOUT, child.wait()).await;
                let status = ended.with_context(|| format!("{} closed stdout and goes on", self.name))?;
                Ok(Started::Ended(status.context("a child can be waited for")?))
            }
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot read what {} says", self.name)),
            Err(_) => bail!("{} is not ready after {READY_TIMEOUT:?}; {}", self.name, self.said()),
        }
    }

    /// What stands before the program of a child.
    pub(super) fn prefix(&self) -> Vec<String> {
        match &self.how {
            How::Child { prefix, .. } => prefix.clone(),
            How::Container(_) => Vec::new(),
        }
    }

    async fn start_container(&self, spawned: impl FnOnce(u32)) -> anyhow::Result<Started> {
        let How::Container(container) = &self.how else { bail!("{} is no container", self.name) };
        match container.start().await.with_context(|| format!("{} does not start", self.name))? {
            Ok(pid) => {
                spawned(pid);
                let life = Life::Container(container.clone());
                Ok(Started::Ready(Box::new(Running { pid, life })))
            }
            Err(status) => {
                // Shown with the error, where it is one.
                self.keep_log().await?;
                Ok(Started::Ended(status))
            }
        }
    }

    /// Writes what a container logged to where a child logs.
    pub(super) async fn keep_log(&self) -> anyhow::Result<()> {
        let How::Container(container) = &self.how else { return Ok(()) };
        let log = container.log().await?;
        std::fs::write(&self.log, log).with_context(|| format!("cannot write {}", self.log.display()))
    }

    /// The end of its log, for a message.
    pub(super) fn said(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let shown = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
        format!("its log ends with:\n{shown}")
    }
}

/// The harness's own soft limit of descriptors, lowered until this is dropped.
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
        // A process may always raise its soft limit to the hard one, which is as it was.
        let _raised = setrlimit(Resource::Nofile, self.0);
    }
}

impl Running {
    /// kill -9, and waits until it is gone.
    pub(super) async fn kill(self) -> anyhow::Result<()> {
        let mut child = match self.life {
            Life::Child { child, .. } => child,
            Life::Container(container) => return container.kill().await,
        };
        signal(self.pid, Signal::KILL)?;
        let ended = tokio::time::timeout(END_TIMEOUT, child.wait()).await;
        ended
            .with_context(|| format!("process {} outlives kill -9", self.pid))?
            .context("a child can be waited for")?;
        Ok(())
    }

    /// SIGTERM, and waits until it has ended.
    pub(super) async fn end(self) -> anyhow::Result<ExitStatus> {
        let mut child = match self.life {
            Life::Child { child, .. } => child,
            Life::Container(container) => return container.end().await,
        };
        signal(self.pid, Signal::TERM)?;
        let ended = tokio::time::timeout(GRACE, child.wait()).await;
        ended
            .with_context(|| format!("process {} goes on {GRACE:?} after SIGTERM", self.pid))?
            .context("a child can be waited for")
    }

    /// How it ended by itself, if it did. A container's engine starts it again.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        match &mut self.life {
            Life::Child { child, .. } => child.try_wait().ok().flatten(),
            Life::Container(_) => None,
        }
    }
}

/// Sends a signal to a process that may have ended by itself.
pub(crate) fn signal(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let target = Pid::from_raw(pid.cast_signed()).context("a process id is positive")?;
    match kill_process(target, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot signal process {pid}")),
    }
}

/// The processes below one, from /proc.
pub(crate) fn descendants(of: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> = texts
        .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    children.into_iter().flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

/// Whether a process is there: a zombie has ended, and only waits for whoever adopted it.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// The pid that a process knows itself by: another than ours in a container.
pub(crate) fn own_pid(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.and_then(|pids| pids.split_whitespace().next_back()?.parse().ok()).unwrap_or(pid)
}
