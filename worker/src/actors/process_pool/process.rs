//! A process of a program, from start to end. The process's requests for data are answered here, and its
//! answers are posted to the process pool. The process gets its socket as its standard input, as an executor
//! does, for the reason in [`crate::process_port`]. The process is started from the actor thread, which
//! lives as long as the worker.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_gpu::process_pool::ProcessSlot;
use millrace_proto::frames::{self, FrameDecoder, ReceivedFrame, SocketFrame};
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

use super::log;
use crate::actor_runtime::Mailbox;
use crate::clock::Clock;
use crate::messages::process_pool::{Message, ProcessEvent, ProcessReply};
use crate::object_handle::TransferRequester;
use crate::process_port::connection::{OfferError, ProcessConnection, is_out_of_resources};
use crate::programs::data::{LastCall, ProcessCall, ProcessData, invalid};
use crate::programs::{HostedProgram, PROGRAM_VARIABLE};

/// Maximum time from the close of a process's socket to the exit.
const EXIT_GRACE: Duration = Duration::from_millis(50);
/// Maximum time to read the rest of a process's output after the exit.
const LOG_GRACE: Duration = Duration::from_millis(50);
/// Maximum number of answers that a process has not read, apart from those in the socket's buffer. Each may
/// hold a descriptor.
const UNREAD_MAX: usize = 16;
/// The worker's environment variables that a process gets, besides those with the prefix
/// [`FUNCTION_VARIABLES`]. Other variables may hold the operator's secrets.
const VARIABLES: [&str; 9] =
    ["HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER"];
/// The prefix of environment variables that an operator sets for functions.
const FUNCTION_VARIABLES: &str = "FUNCTION_";

/// The process pool's handle of a process. Dropping the handle kills the process. The process's watch then kills
/// the processes that the process started.
pub(super) struct Process {
    pub(super) incarnation: Incarnation,
    connection: Rc<ProcessConnection>,
    last_call: LastCall,
    clock: Arc<dyn Clock>,
    // A pidfd refers to this process only, even after the process was reaped and its pid reused.
    pidfd: OwnedFd,
}

/// The reason why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("cannot create the process's socket: {0}")]
    Socket(io::Error),
    #[error("cannot start the process: {0}")]
    Spawn(io::Error),
    #[error("cannot send Hello to the process: {0}")]
    Hello(#[from] frames::FrameError),
}

/// The identity of a process.
#[derive(Debug, Clone)]
pub(super) struct ProcessName {
    pub(super) function: Rc<str>,
    pub(super) place: ProcessSlot,
    pub(super) incarnation: Incarnation,
}

impl Process {
    /// Starts a process. Its events are posted to `pool`. The end of the process is the last event.
    pub(super) fn start(
        program: &Arc<HostedProgram>,
        name: ProcessName,
        pool: Mailbox<Message>,
    ) -> Result<Self, StartError> {
        let programs = program.programs();
        let launcher = programs.launcher();
        let clock = programs.objects().clock();
        let (connection, theirs) = ProcessConnection::pair().map_err(StartError::Socket)?;
        let connection = Rc::new(connection);
        let last_call = LastCall::default();
        let watch = ProcessWatch {
            name: name.clone(),
            connection: Rc::clone(&connection),
            data: ProcessData::new(
                programs.objects().clone(),
                programs.copies().clone(),
                LastCall::clone(&last_call),
            ),
            ready: Cell::new(false),
            last_line: Rc::default(),
            pool,
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
        let mut child = tokio::process::Command::new(&launcher.program)
            .args(&launcher.args)
            .env_clear()
            .envs(variables)
            .envs(launcher.envs.iter().map(|(name, value)| (name, value)))
            .env(PROGRAM_VARIABLE, program.path())
            .current_dir(programs.dir())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C in a terminal signals the whole process group, but the process must outlive the
            // drain.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(StartError::Spawn)?;
        let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        // The child was not waited for yet, so its pid cannot have been reused.
        let pid = pid.ok_or_else(|| StartError::Spawn(io::ErrorKind::NotFound.into()))?;
        let output = child.stdout.take().zip(child.stderr.take());
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| StartError::Spawn(error.into()))?;
        #[allow(deprecated, reason = "unsound only for invalid descriptors; this one is owned")]
        let watched = pidfd.try_clone().and_then(|pidfd| AsyncFd::with_interest(pidfd, Interest::READABLE));
        let leader = Leader { pid, ended: watched.map_err(StartError::Spawn)?, child };
        let incarnation = name.incarnation;
        let log = output.map(|(output, errors)| {
            let clock = Arc::clone(clock);
            let last = Rc::clone(&watch.last_line);
            actix_rt::spawn(async move {
                log::forward(output, errors, name.function, name.place.0, &*clock, &last).await;
            })
        });
        actix_rt::spawn(watch.run(leader, log, programs.closing()));
        Ok(Self { incarnation, connection, last_call, clock: Arc::clone(clock), pidfd })
    }

    /// Sends a request to the process.
    ///
    /// # Errors
    /// [`OfferError::Frame`] if the request does not fit into a frame, or if the process does not read;
    /// [`OfferError::OutOfResources`] if this machine lacks descriptors or memory: the process has received no part of
    /// the request.
    pub(super) fn call(
        &self,
        call: wire::Call,
        descriptors: Vec<OwnedFd>,
        asker: Arc<TransferRequester>,
    ) -> Result<(), OfferError> {
        let until = self.clock.now() + Duration::from_nanos(call.timeout_ns);
        *self.last_call.borrow_mut() = Some(ProcessCall { until, asker });
        self.connection.offer(frame(Told::Call(call), descriptors)?)
    }

    pub(super) fn kill(&self) {
        match pidfd_send_signal(self.pidfd.as_fd(), Signal::KILL) {
            // Without such a process, the process has ended, and its end is reported.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(%error, "cannot kill a function's process"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn frame(message: Told, descriptors: Vec<OwnedFd>) -> Result<SocketFrame, frames::FrameError> {
    SocketFrame::new(&wire::ToProcess { message: Some(message) }, descriptors)
}

/// The task that follows a process from start to end.
struct ProcessWatch {
    name: ProcessName,
    connection: Rc<ProcessConnection>,
    data: ProcessData,
    ready: Cell<bool>,
    /// The last line that the process wrote.
    last_line: log::LastLine,
    pool: Mailbox<Message>,
}

impl ProcessWatch {
    /// Follows the process, and reports its end as the last event.
    async fn run(self, mut leader: Leader, log: Option<JoinHandle<()>>, mut closing: watch::Receiver<bool>) {
        let mut decoder = FrameDecoder::default();
        let end = tokio::select! {
            biased;
            end = self.follow(&mut decoder) => end,
            () = leader.ended() => Ok(()),
            // If the process caused the writer's error, the reader reports it, with the last events.
            error = self.connection.write_rest() => of_the_writer(error),
            _closing = closing.wait_for(|closing| *closing) => {
                Err(io::Error::other("the worker is shutting down"))
            }
        };
        let end = match end {
            Ok(()) => self.read_last_answers(&mut decoder),
            Err(error) => Err(error),
        };
        let lacking = end.as_ref().is_err_and(is_out_of_resources);
        let ended =
            |status| if lacking { ProcessEvent::GivenUp { status } } else { ProcessEvent::Exited { status } };
        let status = match (leader.end(end.is_ok()).await, end) {
            (_, Err(error)) => format!("killed: {error}"),
            (Ok(status), Ok(())) => status.to_string(),
            (Err(error), Ok(())) => format!("unknown: {error}"),
        };
        if self.ready.get() {
            self.post(ended(status));
            finish(log).await;
        } else {
            // The process may have written the reason of its failed start last, so its output is read
            // first.
            finish(log).await;
            let line = self.last_line.borrow();
            let status =
                if line.is_empty() { status } else { format!("{status}; the process wrote {line:?}") };
            drop(line);
            self.post(ended(status));
        }
    }

    fn post(&self, heard: ProcessEvent) {
        let ProcessName { place, incarnation, .. } = self.name;
        self.pool.post(Message::Process { place, incarnation, heard });
    }

    async fn follow(&self, decoder: &mut FrameDecoder) -> io::Result<()> {
        while let Some(frame) = self.connection.receive(decoder).await? {
            self.handle_frame(frame).await?;
        }
        Ok(())
    }

    /// Handles the answers that had arrived when the process ended. Its requests for data no longer need a
    /// response.
    fn read_last_answers(&self, decoder: &mut FrameDecoder) -> io::Result<()> {
        while let Some(frame) = self.connection.receive_now(decoder)? {
            let (said, descriptors) = read(frame)?;
            self.answered(said, descriptors);
        }
        Ok(())
    }

    async fn handle_frame(&self, frame: ReceivedFrame) -> io::Result<()> {
        let (said, mut descriptors) = read(frame)?;
        match said {
            Said::Ready(ready) => return self.handle_greeting(&ready),
            _ if !self.ready.get() => {
                return Err(invalid("the process sent a message before it was ready"));
            }
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

    fn handle_greeting(&self, ready: &wire::Ready) -> io::Result<()> {
        if ready.protocol_version != FUNCTION_PROTOCOL_VERSION {
            let theirs = ready.protocol_version;
            let build = &ready.build;
            let message = format!(
                "the process speaks protocol version {theirs} (build {build}) and this worker version {FUNCTION_PROTOCOL_VERSION}: build the function against this version and apply it again"
            );
            return Err(invalid(message));
        }
        self.ready.set(true);
        self.post(ProcessEvent::Ready);
        Ok(())
    }

    fn answered(&self, said: Said, descriptors: Vec<OwnedFd>) {
        let (call, answer) = match said {
            Said::Return(answer) => {
                let descriptors = descriptors.into_iter().map(Arc::new).collect();
                let stored = self.data.answered(&answer.outputs);
                (answer.call, ProcessReply::Outputs { outputs: answer.outputs, descriptors, stored })
            }
            Said::Fail(fail) => (fail.call, ProcessReply::Failed(fail.message)),
            _ => return,
        };
        self.post(ProcessEvent::Returned { call, answer });
    }

    fn tell(&self, message: Told, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        if self.connection.waiting() >= UNREAD_MAX {
            return Err(invalid("the process sends requests and does not read the answers"));
        }
        Ok(self.connection.send(frame(message, descriptors)?)?)
    }
}

/// Returns the writer's error if this machine lacks descriptors or memory. Other errors count as the end of
/// the process.
fn of_the_writer(error: io::Error) -> io::Result<()> {
    if is_out_of_resources(&error) { Err(error) } else { Ok(()) }
}

/// Waits for the rest of the output, at most [`LOG_GRACE`]: a process that left the group may hold the
/// output open for as long as it likes.
async fn finish(log: Option<JoinHandle<()>>) {
    if let Some(mut log) = log
        && tokio::time::timeout(LOG_GRACE, &mut log).await.is_err()
    {
        log.abort();
    }
}

fn read(frame: ReceivedFrame) -> io::Result<(Said, Vec<OwnedFd>)> {
    let message: wire::FromProcess = frame.decode()?;
    let said = message.message.ok_or_else(|| invalid("a message without content"))?;
    Ok((said, frame.descriptors))
}

/// A process as the leader of its group: the processes that it started, unless they left the group.
struct Leader {
    pid: Pid,
    /// The process's pidfd, readable once the process has ended.
    ended: AsyncFd<OwnedFd>,
    child: Child,
}

impl Leader {
    /// Waits until the process has ended, without reaping it: until the process is reaped, no other group
    /// can get its group id.
    async fn ended(&self) {
        // After an error the end cannot be observed, so the process counts as ended and is killed.
        drop(self.ended.readable().await);
    }

    /// Kills the process group and returns the process's exit status. With `may_end` the process first gets
    /// [`EXIT_GRACE`] to end by itself.
    async fn end(&mut self, may_end: bool) -> io::Result<ExitStatus> {
        if may_end {
            // After the timeout the process is killed below.
            drop(tokio::time::timeout(EXIT_GRACE, self.ended()).await);
        }
        match kill_process_group(self.pid, Signal::KILL) {
            // Without such a group, all its processes have ended.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => tracing::error!(%error, "cannot kill the process group of a function"),
        }
        self.child.start_kill()?;
        self.child.wait().await
    }
}
