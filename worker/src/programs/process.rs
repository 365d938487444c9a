//! One process, from its start to its end: what it asks is answered here, what it answers goes to the
//! Crew. It finds its socket as its standard input, as an executor does ([`crate::process_port`] says
//! why), and is started from the actor thread, which lives as long as the worker.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_policy::crew::Place;
use millrace_proto::frames::{self, Frame, FrameDecoder, Received};
use millrace_proto::function as wire;
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::function::to_process::Message as Told;
use millrace_proto::{BUILD, FUNCTION_PROTOCOL_VERSION};
use millrace_types::Incarnation;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::crew::{Answer, Heard, Message};
use super::data::{Call, Data, LastCall, invalid};
use super::launch::PROGRAM_VARIABLE;
use super::{Program, log};
use crate::clock::Clock;
use crate::process_port::connection::{Connection, Unsent, is_lacking};
use crate::request::Asker;
use crate::seams::Mailbox;

/// How long a process may take to exit after it closed its socket.
const EXIT_GRACE: Duration = Duration::from_millis(50);
/// How long what it wrote is waited for after that.
const LOG_GRACE: Duration = Duration::from_millis(50);
/// Answers that wait for a process to read, beyond what its socket holds: each may have a descriptor.
const UNREAD_MAX: usize = 16;
/// The worker's variables that a process has too, and those whose names begin with
/// [`FUNCTION_VARIABLES`]: others may be the operator's secrets.
const VARIABLES: [&str; 9] =
    ["HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER"];
/// Those that an operator means for functions.
const FUNCTION_VARIABLES: &str = "FUNCTION_";

/// A process, seen from the Crew. Dropping it kills it, and its watch what it started.
pub(super) struct Process {
    pub(super) incarnation: Incarnation,
    connection: Rc<Connection>,
    last_call: LastCall,
    clock: Arc<dyn Clock>,
    // Names this process and never another one, even after it was reaped.
    pidfd: OwnedFd,
}

/// Why none could be started.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("its socket: {0}")]
    Socket(io::Error),
    #[error("it cannot be started: {0}")]
    Spawn(io::Error),
    #[error("its greeting: {0}")]
    Hello(#[from] frames::Error),
}

/// What a process is called.
#[derive(Debug, Clone)]
pub(super) struct Name {
    pub(super) function: Rc<str>,
    pub(super) place: Place,
    pub(super) incarnation: Incarnation,
}

impl Process {
    /// Starts one. What it says is posted to `crew`, its end last.
    pub(super) fn start(
        program: &Arc<Program>,
        name: Name,
        crew: Mailbox<Message>,
    ) -> Result<Self, StartError> {
        let inner = &program.programs.0;
        let (connection, theirs) = Connection::pair().map_err(StartError::Socket)?;
        let (connection, last_call) = (Rc::new(connection), LastCall::default());
        let watch = Watch {
            name: name.clone(),
            connection: Rc::clone(&connection),
            data: Data::new(inner.objects.clone(), inner.aside.clone(), LastCall::clone(&last_call)),
            ready: Cell::new(false),
            last_line: Rc::default(),
            crew,
        };
        let hello = wire::Hello {
            protocol_version: FUNCTION_PROTOCOL_VERSION,
            build: BUILD.into(),
            function: name.function.to_string(),
            ids: Some(watch.data.ids()),
        };
        connection.send(frame(Told::Hello(hello), Vec::new())?)?;
        let passed =
            |variable: &str| VARIABLES.contains(&variable) || variable.starts_with(FUNCTION_VARIABLES);
        let variables = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(passed));
        let mut child = tokio::process::Command::new(&inner.launcher.program)
            .args(&inner.launcher.args)
            .env_clear()
            .envs(variables)
            .envs(inner.launcher.envs.iter().map(|(name, value)| (name, value)))
            .env(PROGRAM_VARIABLE, &program.path)
            .current_dir(&inner.dir)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal goes to the whole group: it must outlive the drain.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(StartError::Spawn)?;
        let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        // The child is ours and was not waited for, so its pid is still its own.
        let pid = pid.ok_or_else(|| StartError::Spawn(io::ErrorKind::NotFound.into()))?;
        let output = child.stdout.take().zip(child.stderr.take());
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| StartError::Spawn(error.into()))?;
        #[allow(deprecated, reason = "unsound for what is no real descriptor; this one is owned")]
        let watched = pidfd.try_clone().and_then(|pidfd| AsyncFd::with_interest(pidfd, Interest::READABLE));
        let leader = Leader { pid, ended: watched.map_err(StartError::Spawn)?, child };
        let incarnation = name.incarnation;
        let log = output.map(|(output, errors)| {
            let (clock, last) = (Arc::clone(inner.objects.clock()), Rc::clone(&watch.last_line));
            actix_rt::spawn(async move {
                log::forward(output, errors, (name.function, name.place.0), &*clock, &last).await;
            })
        });
        actix_rt::spawn(watch.run(leader, log, inner.closing.subscribe()));
        Ok(Self { incarnation, connection, last_call, clock: Arc::clone(inner.objects.clock()), pidfd })
    }

    /// Gives it a request.
    ///
    /// # Errors
    /// A request that fits no frame, or a process that does not read; [`Unsent::Lacking`], after which the
    /// process knows nothing of it.
    pub(super) fn call(
        &self,
        call: wire::Call,
        descriptors: Vec<OwnedFd>,
        asker: Arc<Asker>,
    ) -> Result<(), Unsent> {
        let until = self.clock.now() + Duration::from_nanos(call.timeout_ns);
        *self.last_call.borrow_mut() = Some(Call { until, asker });
        self.connection.offer(frame(Told::Call(call), descriptors)?)
    }

    pub(super) fn kill(&self) {
        match pidfd_send_signal(self.pidfd.as_fd(), Signal::KILL) {
            // It is gone already, and its end reported or on the way.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(%error, "a function's process cannot be killed"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn frame(message: Told, descriptors: Vec<OwnedFd>) -> Result<Frame, frames::Error> {
    Frame::new(&wire::ToProcess { message: Some(message) }, descriptors)
}

/// One process under watch.
struct Watch {
    name: Name,
    connection: Rc<Connection>,
    data: Data,
    ready: Cell<bool>,
    /// What it wrote last.
    last_line: log::LastLine,
    crew: Mailbox<Message>,
}

impl Watch {
    /// Watches until the process has ended, and says that last.
    async fn run(self, mut leader: Leader, log: Option<JoinHandle<()>>, mut closing: watch::Receiver<bool>) {
        let mut decoder = FrameDecoder::default();
        let end = tokio::select! {
            biased;
            end = self.follow(&mut decoder) => end,
            () = leader.ended() => Ok(()),
            // The reader meets what ended the writer, unless it is nothing of the process's.
            error = self.connection.write_rest() => of_the_writer(error),
            // Closed with the worker.
            _closing = closing.wait_for(|closing| *closing) => Err(io::Error::other("the worker stops")),
        };
        let end = match end {
            Ok(()) => self.last_words(&mut decoder),
            Err(error) => Err(error),
        };
        let lacking = end.as_ref().is_err_and(is_lacking);
        let ended = |status| if lacking { Heard::GivenUp { status } } else { Heard::Exited { status } };
        let status = match (leader.end(end.is_ok()).await, end) {
            (_, Err(error)) => format!("killed: {error}"),
            (Ok(status), Ok(())) => status.to_string(),
            (Err(error), Ok(())) => format!("unknown: {error}"),
        };
        if self.ready.get() {
            self.post(ended(status));
            finish(log).await;
        } else {
            // Why it did not start it may have written last.
            finish(log).await;
            let line = self.last_line.borrow();
            let status = if line.is_empty() { status } else { format!("{status}; it wrote {line:?}") };
            drop(line);
            self.post(ended(status));
        }
    }

    fn post(&self, heard: Heard) {
        let Name { place, incarnation, .. } = self.name;
        self.crew.post(Message::Process { place, incarnation, heard });
    }

    async fn follow(&self, decoder: &mut FrameDecoder) -> io::Result<()> {
        while let Some(frame) = self.connection.receive(decoder).await? {
            self.obey(frame).await?;
        }
        Ok(())
    }

    /// What had arrived when it ended: answers; of what it asked nothing is wanted any more.
    fn last_words(&self, decoder: &mut FrameDecoder) -> io::Result<()> {
        while let Some(frame) = self.connection.receive_now(decoder)? {
            let (said, descriptors) = read(frame)?;
            self.answered(said, descriptors);
        }
        Ok(())
    }

    async fn obey(&self, frame: Received) -> io::Result<()> {
        let (said, mut descriptors) = read(frame)?;
        match said {
            Said::Ready(ready) => return self.greeted(&ready),
            _ if !self.ready.get() => return Err(invalid("it spoke before it was ready")),
            Said::Store(store) => {
                let stored = self.data.store(store, descriptors.pop()).await?;
                self.tell(Told::Stored(stored), Vec::new())?;
            }
            Said::Fetch(fetch) => {
                let (fetched, descriptors) = self.data.fetch(&fetch).await?;
                self.tell(Told::Fetched(fetched), descriptors)?;
            }
            Said::TakeIds(_) => self.tell(Told::Ids(self.data.ids()), Vec::new())?,
            said => self.answered(said, descriptors),
        }
        Ok(())
    }

    fn greeted(&self, ready: &wire::Ready) -> io::Result<()> {
        if ready.protocol_version != FUNCTION_PROTOCOL_VERSION {
            let (theirs, build) = (ready.protocol_version, &ready.build);
            let message = format!(
                "it speaks protocol {theirs} (build {build}) and this worker {FUNCTION_PROTOCOL_VERSION}: build the function against this version and apply it again"
            );
            return Err(invalid(message));
        }
        self.ready.set(true);
        self.post(Heard::Ready);
        Ok(())
    }

    fn answered(&self, said: Said, descriptors: Vec<OwnedFd>) {
        let (call, answer) = match said {
            Said::Return(answer) => {
                let descriptors = descriptors.into_iter().map(Arc::new).collect();
                let stored = self.data.answered(&answer.outputs);
                (answer.call, Answer::Outputs { outputs: answer.outputs, descriptors, stored })
            }
            Said::Fail(fail) => (fail.call, Answer::Failed(fail.message)),
            _ => return,
        };
        self.post(Heard::Returned { call, answer });
    }

    fn tell(&self, message: Told, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        if self.connection.waiting() >= UNREAD_MAX {
            return Err(invalid("it asks, and does not read the answers"));
        }
        Ok(self.connection.send(frame(message, descriptors)?)?)
    }
}

/// What ended the writer, where it is for want of what this machine lacks.
fn of_the_writer(error: io::Error) -> io::Result<()> {
    if is_lacking(&error) { Err(error) } else { Ok(()) }
}

/// What left its group may hold its output open for as long as it likes.
async fn finish(log: Option<JoinHandle<()>>) {
    if let Some(mut log) = log
        && tokio::time::timeout(LOG_GRACE, &mut log).await.is_err()
    {
        log.abort();
    }
}

fn read(frame: Received) -> io::Result<(Said, Vec<OwnedFd>)> {
    let message: wire::FromProcess = frame.decode()?;
    let said = message.message.ok_or_else(|| invalid("a message without content"))?;
    Ok((said, frame.descriptors))
}

/// A process and those that it started, which are its group unless they left it.
struct Leader {
    pid: Pid,
    /// Readable once it has ended.
    ended: AsyncFd<OwnedFd>,
    child: Child,
}

impl Leader {
    /// Waits until it has ended, and leaves its status: until that is taken, its group's name is its own.
    async fn ended(&self) {
        // An error means that nothing more is heard of it: it is killed.
        drop(self.ended.readable().await);
    }

    /// Its status, once it has one. What does not end by itself is killed, and the group in any case.
    async fn end(&mut self, may_end: bool) -> io::Result<ExitStatus> {
        if may_end {
            // What takes longer is killed.
            drop(tokio::time::timeout(EXIT_GRACE, self.ended()).await);
        }
        match kill_process_group(self.pid, Signal::KILL) {
            // All of it is gone.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(%error, "the processes of a function cannot be killed"),
        }
        self.child.start_kill()?;
        self.child.wait().await
    }
}
