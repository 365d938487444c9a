//! A `millrace up` under test, and the verbs that call it.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::{NamedTempFile, TempDir};

/// The longest time of any step before the step counts as hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running cluster. Killed when dropped.
pub(crate) struct RunningCluster {
    child: Child,
    stdout: BufReader<ChildStdout>,
    /// The standard error. Printed when the test fails.
    stderr: NamedTempFile,
    /// The ready line of the cluster.
    pub(crate) ready: Value,
    /// All endpoints, separated by commas.
    pub(crate) client: String,
    /// The folder for an ephemeral cluster's data. Removed after the processes are killed.
    _temporary: TempDir,
}

/// A process of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupProcess {
    pub(crate) name: String,
    pub(crate) pid: u32,
    /// The id and client address of a controller. `None` for a worker.
    pub(crate) controller: Option<(u64, String)>,
}

pub(crate) fn millrace() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    // The user's own settings must not reach the tests.
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", "/nonexistent");
    command
}

/// Returns the path of a file in the repository.
pub(crate) fn repository(path: &str) -> String {
    format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns a free port of a loopback address that no other test has. A killed process therefore
/// keeps its port to itself. On a shared address, another test's cluster could bind the port and
/// answer in its place.
pub(crate) fn free() -> String {
    static GIVEN: AtomicU8 = AtomicU8::new(1);
    let number = GIVEN.fetch_add(1, Ordering::Relaxed);
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{low}.{number}:0", 1 | high)
}

impl RunningCluster {
    pub(crate) fn ephemeral(args: &[&str]) -> Self {
        Self::start(&[&["--ephemeral"], args].concat())
    }

    pub(crate) fn in_dir(dir: &Path) -> Self {
        let dir = dir.to_str().expect("a temporary folder's name is text");
        Self::start(&["--data-dir", dir])
    }

    /// Starts three controllers and a number of workers with one small GPU each, at free ports.
    pub(crate) fn group(dir: Option<&Path>, workers: u32, more: &[&str]) -> Self {
        let workers = workers.to_string();
        let mut args = vec!["--controllers", "3", "--workers", &workers, "--gpus", "1", "--grace", "5s"];
        args.extend(["--gpu-memory", "256MiB", "--host-memory", "256MiB"]);
        match dir {
            Some(dir) => {
                args.extend(["--data-dir", dir.to_str().expect("a temporary folder's name is text")])
            }
            None => args.push("--ephemeral"),
        }
        args.extend(more);
        Self::start(&args)
    }

    /// Starts a cluster with further environment variables.
    pub(crate) fn ephemeral_with(args: &[&str], variables: &[(&str, &Path)]) -> Self {
        Self::start_with(&[&["--ephemeral"], args].concat(), variables)
    }

    fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    fn start_with(args: &[&str], variables: &[(&str, &Path)]) -> Self {
        let stderr = NamedTempFile::new().expect("a temporary file can be created");
        let temporary = TempDir::new().expect("a temporary folder can be created");
        let free = free();
        let mut child = millrace()
            .args(["up", "--listen", &free, "--internal-listen", &free, "--worker-listen", &free])
            .args(args)
            // A killed cluster leaves its data, 256 MiB and more for each controller, so keep it in
            // a folder of the test.
            .env("TMPDIR", temporary.path())
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(stderr.reopen().expect("the file can be reopened"))
            .spawn()
            .expect("the binary was built");
        let mut stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("the ready line is text");
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            let said = std::fs::read_to_string(stderr.path()).unwrap_or_default();
            panic!("no ready line: {line:?}; stderr: {said}")
        });
        assert_eq!(ready["ready"], true);
        let endpoints = ready["endpoints"].as_array().expect("the ready line names the endpoints");
        let endpoints: Vec<_> = endpoints.iter().filter_map(Value::as_str).collect();
        let client = endpoints.join(",");
        Self { child, stdout, stderr, ready, client, _temporary: temporary }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the standard error so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(self.stderr.path()).expect("messages are text")
    }

    /// Returns the processes of a group, controllers first.
    pub(crate) fn parts(&self) -> Vec<GroupProcess> {
        let part = |part: &Value| GroupProcess {
            name: part["name"].as_str().expect("a part has a name").to_owned(),
            pid: u32::try_from(part["pid"].as_u64().expect("a part has a pid")).expect("a pid is small"),
            controller: part["id"].as_u64().zip(part["client"].as_str().map(str::to_owned)),
        };
        self.ready["parts"].as_array().expect("a group has parts").iter().map(part).collect()
    }

    pub(crate) fn part(&self, name: &str) -> GroupProcess {
        self.parts().into_iter().find(|part| part.name == name).expect("the part is in the ready line")
    }

    /// Returns every process below this one: the group's processes and their executors.
    pub(crate) fn descendants(&self) -> Vec<u32> {
        let parts = children_of(self.child.id());
        let executors = parts.iter().flat_map(|&part| children_of(part));
        executors.chain(parts.iter().copied()).collect()
    }

    /// Runs a verb against this cluster.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        millrace().args(args).args(["-e", &self.client]).output().expect("the binary runs")
    }

    /// Runs a verb that must succeed. Returns the standard output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {stderr}");
        String::from_utf8(output.stdout).expect("output is UTF-8")
    }

    /// Runs a verb that must fail with this exit code. Returns the standard error.
    pub(crate) fn refused(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        stderr
    }

    /// Returns the JSON document that a verb prints, or the items of a list.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let text = self.ok(&[args, &["-o", "json"]].concat());
        let mut document: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{args:?}: {error}: {text}"));
        if document["kind"] == "List" { document["items"].take() } else { document }
    }

    /// Publishes the example classifier.
    pub(crate) fn apply_digits(&self) -> String {
        self.ok(&["apply", "-f", &repository("examples/digits/function.yaml")])
    }

    /// Returns the pids of the executors.
    pub(crate) fn executors(&self) -> Vec<u32> {
        children_of(self.child.id())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the cluster's process is ours");
    }

    /// Waits for the end. Returns the exit status and the rest of the standard output.
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).expect("output is UTF-8");
        (self.child.wait().expect("the child is ours"), rest)
    }
}

impl GroupProcess {
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid.cast_signed()).expect("a part has a pid");
        kill_process(pid, signal).expect("the part is a process of ours");
    }
}

impl Drop for RunningCluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "the cluster's stderr:\n{}",
                std::fs::read_to_string(self.stderr.path()).unwrap_or_default()
            );
        }
        // Both calls fail if the process has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Returns the children of a process, from /proc.
fn children_of(parent: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).expect("the process runs");
    let children =
        tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    children
        .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Waits until none of these processes is left.
pub(crate) fn wait_gone(pids: &[u32]) {
    // Look at each thread. The first thread is a zombie as soon as it has ended, while other
    // threads still end and hold the process's sockets open. A zombie counts as ended: its adoptive
    // parent has not reaped it yet.
    let alive = |pid: &u32| {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let mut stats = threads.map(|it| std::fs::read_to_string(it.path().join("stat")).unwrap_or_default());
        stats.any(|stat| !stat.is_empty() && !stat.contains(") Z ") && !stat.contains(") X "))
    };
    eventually("the processes are gone", || !pids.iter().any(alive));
}

/// Polls until the condition holds. The watched state belongs to other processes, which cannot
/// notify the test.
#[allow(clippy::disallowed_methods, reason = "real processes in real time")]
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !so() {
        assert!(std::time::Instant::now() < deadline, "not after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
