//! One process of a group: how it is started, what is heard of it, and how it is ended.
//!
//! A part dies with this process (kill -9 included), and the executors of a worker with it. It has
//! a process group of its own: Ctrl-C in a terminal is for us, who end the parts in order.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::Instant;

use super::restart::Backoff;
use crate::clock;
use crate::failure::Failure;

/// The longest piece of a part's log that is passed on at a time.
const LOG_BYTES: usize = 8 << 10;

/// What a part is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Controller { id: u64 },
    Worker,
}

/// How its log lines are passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Log {
    /// With its name before each.
    Named,
    /// As they are: each is a document.
    AsIs,
}

/// A process, and how to start it.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) role: Role,
    program: PathBuf,
    /// What is typed to start it, addresses apart.
    words: Vec<String>,
    /// What is typed besides until it was ready once: how it enters the group. Never later: over a
    /// folder that was emptied meanwhile it would begin a second cluster.
    pub(super) entry: Vec<String>,
    /// Its addresses, as they are typed: once it took ports, those.
    pub(super) addresses: Vec<String>,
    log: Log,
    state: State,
    backoff: Backoff,
}

#[derive(Debug)]
enum State {
    Running(Box<Running>),
    /// It ended, and is started again.
    Due(Instant),
    Down,
}

#[derive(Debug)]
struct Running {
    child: Child,
    pid: u32,
    since: Instant,
    /// Until its ready line came.
    output: Option<Lines<BufReader<ChildStdout>>>,
}

/// What is heard of a part.
#[derive(Debug)]
pub(super) enum Event {
    /// Its ready line.
    Ready(String),
    /// Its end.
    Ended { pid: u32, status: ExitStatus, lived: Duration },
    /// It is time to start it again.
    Due,
}

impl Part {
    pub(super) fn new(
        name: String,
        role: Role,
        words: Vec<String>,
        addresses: Vec<String>,
        log: Log,
    ) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?;
        let (state, backoff) = (State::Down, Backoff::default());
        Ok(Self { name, role, program, words, entry: Vec::new(), addresses, log, state, backoff })
    }

    /// Starts it. On the main thread: the kernel ends a part with the thread that started it.
    pub(super) fn start(&mut self) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::failed(format!("cannot start {}: {error}", self.name));
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
        // There is one: it was not waited for.
        let pid = child.id().unwrap_or_default();
        if let Some(errors) = child.stderr.take() {
            let prefix = match self.log {
                Log::Named => format!("{:<12} | ", self.name),
                Log::AsIs => String::new(),
            };
            tokio::spawn(pass_on(BufReader::with_capacity(LOG_BYTES, errors), prefix));
        }
        let output = child.stdout.take().map(|output| BufReader::new(output).lines());
        self.state = State::Running(Box::new(Running { child, pid, since: clock::now(), output }));
        Ok(())
    }

    /// The next thing heard of it. Cancelling loses nothing.
    pub(super) async fn event(&mut self) -> Event {
        let running = match &mut self.state {
            State::Running(running) => running,
            State::Due(at) => {
                tokio::time::sleep_until(*at).await;
                return Event::Due;
            }
            State::Down => return std::future::pending().await,
        };
        if let Some(output) = &mut running.output {
            // At the end of the output there is no line: its end is next.
            if let Ok(Some(line)) = output.next_line().await {
                running.output = None;
                return Event::Ready(line);
            }
            running.output = None;
        }
        match running.child.wait().await {
            Ok(status) => {
                let (pid, lived) = (running.pid, running.since.elapsed());
                self.state = State::Down;
                Event::Ended { pid, status, lived }
            }
            Err(error) => {
                tracing::error!(part = self.name, %error, "cannot wait for a part's end");
                self.state = State::Down;
                std::future::pending().await
            }
        }
    }

    /// Starts it again, so long after it ended.
    pub(super) fn start_later(&mut self, lived: Duration) -> Duration {
        let wait = self.backoff.wait(lived);
        self.state = State::Due(clock::now() + wait);
        wait
    }

    /// Whether it runs and has not said that it is ready.
    pub(super) fn awaits_ready(&self) -> bool {
        matches!(&self.state, State::Running(running) if running.output.is_some())
    }

    pub(super) fn pid(&self) -> Option<u32> {
        match &self.state {
            State::Running(running) => Some(running.pid),
            State::Due(_) | State::Down => None,
        }
    }

    /// Tells it to stop, and waits until it has. One that was to be started again is not.
    pub(super) async fn stop(&mut self) {
        let State::Running(running) = &mut self.state else {
            self.state = State::Down;
            return;
        };
        let pid = i32::try_from(running.pid).ok().and_then(Pid::from_raw);
        // It may have ended by itself; it was not waited for, so its pid is still its own.
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            tracing::debug!(part = self.name, %error, "it cannot be told to stop");
        }
        if let Err(error) = running.child.wait().await {
            tracing::error!(part = self.name, %error, "cannot wait for a part's end");
        }
        self.state = State::Down;
    }

    /// What to type to start it by hand.
    pub(super) fn command_line(&self) -> String {
        let words = std::iter::once("millrace").map(str::to_owned);
        let words = words.chain(self.words.iter().chain(&self.entry).chain(&self.addresses).cloned());
        words.map(quoted).collect::<Vec<_>>().join(" ")
    }
}

/// A word as a shell takes it.
fn quoted(word: String) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// How a process ended, in words.
pub(super) fn end_in_words(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// Passes a part's messages on, line by line; a very long line in pieces.
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
    fn a_command_line_can_be_typed() {
        let words = ["worker", "--data-dir", "/a b/it's", "--listen", "127.0.0.1:1"];
        let words = words.map(str::to_owned).to_vec();
        let part = Part::new("worker-1".into(), Role::Worker, words, vec!["--gpus".into()], Log::Named);
        assert_eq!(
            part.unwrap().command_line(),
            r"millrace worker --data-dir '/a b/it'\''s' --listen 127.0.0.1:1 --gpus"
        );
    }
}
