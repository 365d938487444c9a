//! A process of a group: its start, its events and its end.
//!
//! The process dies with this one, kill -9 included, and a worker's executors die with the worker.
//! The process has a process group of its own: Ctrl-C in a terminal reaches only this process,
//! which ends the others in order.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::Instant;

use super::restart::RestartBackoff;
use crate::clock;
use crate::failure::CommandFailure;

/// The time beyond the grace period that a process may take to stop before it is killed.
pub(super) const STOP_MARGIN: Duration = Duration::from_secs(15);
/// The longest piece of a log line that is forwarded at once, in bytes.
const LOG_BYTES: usize = 8 << 10;

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildRole {
    Controller { id: u64 },
    Worker,
}

/// The format in which log lines are forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogPrefix {
    /// Each line follows the name of the process.
    Named,
    /// Lines are unchanged, because each is a JSON document.
    AsIs,
}

/// A process, and the command that starts it.
#[derive(Debug)]
pub(super) struct ChildServer {
    pub(super) name: String,
    pub(super) role: ChildRole,
    program: PathBuf,
    /// The command-line words without the addresses.
    words: Vec<String>,
    /// Further words until the process was first ready: the way in which it enters the group. The
    /// words are never used later: over a folder that was emptied meanwhile, they would bootstrap a
    /// second cluster.
    pub(super) entry: Vec<String>,
    /// The words for the listen addresses. Once the process has bound ports, the words name these
    /// ports.
    pub(super) addresses: Vec<String>,
    log: LogPrefix,
    state: State,
    backoff: RestartBackoff,
}

#[derive(Debug)]
enum State {
    Running(Box<Running>),
    /// The process ended, and restarts at this moment.
    Due(Instant),
    Down,
}

#[derive(Debug)]
struct Running {
    child: Child,
    pid: u32,
    since: Instant,
    /// The output until the ready line arrived, then `None`.
    output: Option<Lines<BufReader<ChildStdout>>>,
}

/// An event of a process.
#[derive(Debug)]
pub(super) enum ChildEvent {
    /// The process printed the ready line.
    Ready(String),
    /// The process ended.
    Ended { pid: u32, status: ExitStatus, lived: Duration },
    /// The restart of the process is due.
    Due,
}

impl ChildServer {
    pub(super) fn new(
        name: String,
        role: ChildRole,
        words: Vec<String>,
        addresses: Vec<String>,
        log: LogPrefix,
    ) -> Result<Self, CommandFailure> {
        let program = std::env::current_exe()
            .map_err(|error| CommandFailure::failed(format!("cannot find this program: {error}")))?;
        Ok(Self {
            name,
            role,
            program,
            words,
            entry: Vec::new(),
            addresses,
            log,
            state: State::Down,
            backoff: RestartBackoff::default(),
        })
    }

    /// Starts the process. Must be called on the main thread, because the kernel ends the child
    /// with the thread that started it.
    pub(super) fn start(&mut self) -> Result<(), CommandFailure> {
        let failed =
            |error: std::io::Error| CommandFailure::failed(format!("cannot start {}: {error}", self.name));
        let mut child = Command::new(&self.program)
            .args(&self.words)
            .args(&self.entry)
            .args(&self.addresses)
            .args(["--die-with", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        // The pid is known until the child is awaited, and it was not.
        let pid = child.id().unwrap_or_default();
        if let Some(errors) = child.stderr.take() {
            let prefix = match self.log {
                LogPrefix::Named => format!("{:<12} | ", self.name),
                LogPrefix::AsIs => String::new(),
            };
            tokio::spawn(pass_on(BufReader::with_capacity(LOG_BYTES, errors), prefix));
        }
        let output = child.stdout.take().map(|output| BufReader::new(output).lines());
        self.state = State::Running(Box::new(Running { child, pid, since: clock::now(), output }));
        Ok(())
    }

    /// Waits for the next event of the process. Cancel-safe.
    pub(super) async fn event(&mut self) -> ChildEvent {
        let running = match &mut self.state {
            State::Running(running) => running,
            State::Due(at) => {
                tokio::time::sleep_until(*at).await;
                return ChildEvent::Due;
            }
            State::Down => return std::future::pending().await,
        };
        if let Some(output) = &mut running.output {
            // At the end of the output there is no line: the next event is the end of the process.
            if let Ok(Some(line)) = output.next_line().await {
                running.output = None;
                return ChildEvent::Ready(line);
            }
            running.output = None;
        }
        match running.child.wait().await {
            Ok(status) => {
                let pid = running.pid;
                let lived = running.since.elapsed();
                self.state = State::Down;
                ChildEvent::Ended { pid, status, lived }
            }
            Err(error) => {
                tracing::error!(part = self.name, %error, "cannot wait for the end of a process");
                self.state = State::Down;
                std::future::pending().await
            }
        }
    }

    /// Schedules the restart of a process that lived this long. Returns the wait.
    pub(super) fn start_later(&mut self, lived: Duration) -> Duration {
        let wait = self.backoff.wait(lived);
        self.state = State::Due(clock::now() + wait);
        wait
    }

    /// Returns whether the process runs but has not printed its ready line.
    pub(super) fn awaits_ready(&self) -> bool {
        matches!(&self.state, State::Running(running) if running.output.is_some())
    }

    pub(super) fn pid(&self) -> Option<u32> {
        match &self.state {
            State::Running(running) => Some(running.pid),
            State::Due(_) | State::Down => None,
        }
    }

    /// Asks the process to stop, and waits for the end. Cancels a scheduled restart.
    pub(super) async fn stop(&mut self) {
        let State::Running(running) = &mut self.state else {
            self.state = State::Down;
            return;
        };
        let pid = i32::try_from(running.pid).ok().and_then(Pid::from_raw);
        // The process may have ended already, but its pid is not reused before the child is
        // awaited.
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            tracing::debug!(part = self.name, %error, "cannot signal a process to stop");
        }
        if let Err(error) = running.child.wait().await {
            tracing::error!(part = self.name, %error, "cannot wait for the end of a process");
        }
        self.state = State::Down;
    }

    /// Returns the shell command that starts the process by hand.
    pub(super) fn command_line(&self) -> String {
        let words = std::iter::once("millrace").map(str::to_owned);
        let words = words.chain(self.words.iter().chain(&self.entry).chain(&self.addresses).cloned());
        words.map(quoted).collect::<Vec<_>>().join(" ")
    }
}

/// Quotes a word for a shell.
fn quoted(word: String) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Describes the end of a process.
pub(super) fn end_in_words(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Forwards the log of a process line by line. A very long line is split.
async fn pass_on(mut messages: impl AsyncBufRead + Unpin, prefix: String) {
    loop {
        let Ok(buffer) = messages.fill_buf().await else { return };
        if buffer.is_empty() {
            return;
        }
        let end = buffer.iter().position(|&byte| byte == b'\n');
        let (line, used) = match end {
            Some(end) => (&buffer[..end], end + 1),
            None => (buffer, buffer.len()),
        };
        eprintln!("{prefix}{}", String::from_utf8_lossy(line));
        messages.consume(used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_quoted_for_a_shell() {
        let words = ["worker", "--data-dir", "/a b/it's", "--listen", "127.0.0.1:1"];
        let words = words.map(str::to_owned).to_vec();
        let part = ChildServer::new(
            "worker-1".into(),
            ChildRole::Worker,
            words,
            vec!["--gpus".into()],
            LogPrefix::Named,
        );
        assert_eq!(
            part.unwrap().command_line(),
            r"millrace worker --data-dir '/a b/it'\''s' --listen 127.0.0.1:1 --gpus"
        );
    }
}
