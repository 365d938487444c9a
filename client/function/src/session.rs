//! The socket to the worker. Calls arrive one after another, and a call's messages to the worker
//! cross the same socket.

use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_proto::frames::{FrameDecoder, FrameQueue, SocketFrame};
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::function::to_process::Message as Heard;
use millrace_proto::function::{FromProcess, Ready, TakeIds, ToProcess};
use millrace_proto::{BUILD, FUNCTION_PROTOCOL_VERSION};
use millrace_types::DataId;

use crate::call::Call;
use crate::error::Error;
use crate::ids::Ids;

/// The connection of a process to its worker.
#[derive(Debug)]
pub struct Session(Arc<SessionState>);

/// The state that a session and its calls share.
#[derive(Debug)]
pub(crate) struct SessionState {
    /// The socket. The lock is held for a message and its reply, so calls send one message at a
    /// time.
    link: Mutex<Link>,
    ids: Ids,
}

#[derive(Debug)]
struct Link {
    socket: OwnedFd,
    decoder: FrameDecoder,
    outbox: FrameQueue,
    /// The number of the call that is not answered yet.
    open: Option<u64>,
}

/// A message that arrived, and its descriptors.
pub(crate) struct ReceivedMessage {
    pub(crate) message: Heard,
    descriptors: VecDeque<Option<OwnedFd>>,
}

impl ReceivedMessage {
    /// Takes a descriptor that arrived with the message. Each descriptor can be taken once.
    pub(crate) fn take(&mut self, place: u32) -> Result<OwnedFd, Error> {
        let fd = self.descriptors.get_mut(place as usize).and_then(Option::take);
        fd.ok_or(Error::Protocol("a descriptor is missing"))
    }
}

impl Link {
    fn send(&mut self, message: Said, descriptors: Vec<OwnedFd>) -> Result<(), Error> {
        let frame = SocketFrame::new(&FromProcess { message: Some(message) }, descriptors).map_err(broken)?;
        self.outbox.push(frame).map_err(broken)?;
        self.outbox.flush(&self.socket).map_err(Error::Socket)
    }

    /// Waits for the next message. Returns `None` when the worker has closed its end.
    fn receive(&mut self) -> Result<Option<ReceivedMessage>, Error> {
        let frame = match self.decoder.recv_frame(&self.socket) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(Error::Socket(error)),
        };
        let message: ToProcess = frame.decode().map_err(broken)?;
        let message = message.message.ok_or(Error::Protocol("a message without content"))?;
        let descriptors = frame.descriptors.into_iter().map(Some).collect();
        Ok(Some(ReceivedMessage { message, descriptors }))
    }
}

fn broken(error: millrace_proto::frames::FrameError) -> Error {
    Error::Socket(error.into())
}

impl SessionState {
    fn link(&self) -> MutexGuard<'_, Link> {
        // A message is sent whole or not at all, so a poisoned link is still valid, or the socket
        // reports an error.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the open call.
    pub(crate) fn answer(&self, message: Said, descriptors: Vec<OwnedFd>) -> Result<(), Error> {
        let mut link = self.link();
        link.open = None;
        link.send(message, descriptors)
    }

    /// Sends a message of a call and waits for the reply. After the call is answered, the next
    /// message on the socket may be another call.
    pub(crate) fn ask(
        &self,
        call: u64,
        message: Said,
        descriptors: Vec<OwnedFd>,
    ) -> Result<ReceivedMessage, Error> {
        let mut link = self.link();
        if link.open != Some(call) {
            return Err(Error::AlreadyAnswered);
        }
        link.send(message, descriptors)?;
        link.receive()?.ok_or_else(|| Error::Socket(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Discards the remaining ids, because the registration under which the worker assigned them is
    /// over. The next id is from a new block.
    pub(crate) fn discard_ids(&self) {
        self.ids.forget();
    }

    /// Returns an id that nothing else has. Asks the worker only when a block is used up, once in
    /// many millions of ids.
    pub(crate) fn unique_id(&self, call: u64) -> Result<DataId, Error> {
        if let Some(id) = self.ids.take() {
            return Ok(id);
        }
        let Heard::Ids(block) = self.ask(call, Said::TakeIds(TakeIds {}), Vec::new())?.message else {
            return Err(Error::Protocol("the reply to a request for ids has another type"));
        };
        self.ids.refill(block);
        self.ids.take().ok_or(Error::NoIds)
    }
}

impl Session {
    /// Greets the worker that started this process, over the socket at standard input. Replaces
    /// standard input with an empty file, so that a child of this process cannot read the worker's
    /// messages.
    ///
    /// # Errors
    /// [`Error::Socket`] when no worker started the process, [`Error::Version`] when the worker is
    /// of another version.
    pub fn open() -> Result<Self, Error> {
        let socket = io::stdin().as_fd().try_clone_to_owned().map_err(Error::Socket)?;
        let nothing = File::open("/dev/null").map_err(Error::Socket)?;
        rustix::stdio::dup2_stdin(&nothing).map_err(|error| Error::Socket(error.into()))?;
        Self::over(socket)
    }

    /// Greets a worker over another socket than standard input.
    ///
    /// # Errors
    /// The errors of [`Self::open`].
    pub fn over(socket: OwnedFd) -> Result<Self, Error> {
        let mut link =
            Link { socket, decoder: FrameDecoder::default(), outbox: FrameQueue::default(), open: None };
        let closed = || Error::Socket(io::ErrorKind::UnexpectedEof.into());
        let Heard::Hello(hello) = link.receive()?.ok_or_else(closed)?.message else {
            return Err(Error::Protocol("the first message is not a greeting"));
        };
        if hello.protocol_version != FUNCTION_PROTOCOL_VERSION {
            return Err(Error::Version { theirs: hello.protocol_version, build: hello.build });
        }
        let ids = Ids::default();
        ids.refill(hello.ids.unwrap_or_default());
        let ready = Ready { protocol_version: FUNCTION_PROTOCOL_VERSION, build: BUILD.to_owned() };
        link.send(Said::Ready(ready), Vec::new())?;
        Ok(Self(Arc::new(SessionState { link: Mutex::new(link), ids })))
    }

    /// Waits for the next call. Returns `None` when the worker needs this process no longer. The
    /// previous call must be answered first.
    ///
    /// # Errors
    /// [`Error::CallUnanswered`] while the previous call is not answered. [`Error::Socket`] and
    /// [`Error::Protocol`], after which the process should exit.
    pub fn next_call(&self) -> Result<Option<Call>, Error> {
        let mut link = self.0.link();
        if link.open.is_some() {
            return Err(Error::CallUnanswered);
        }
        let Some(mut arrived) = link.receive()? else { return Ok(None) };
        let Heard::Call(call) = &mut arrived.message else {
            return Err(Error::Protocol("the message is not a call"));
        };
        let call = std::mem::take(call);
        link.open = Some(call.call);
        drop(link);
        Call::new(Arc::clone(&self.0), call, arrived).map(Some)
    }
}

/// Serves calls until the worker needs the process no longer. The main function of a program calls
/// this function. An error of `function` fails the request. A panic ends the process, and the
/// worker starts another.
///
/// # Errors
/// The errors of [`Session::open`] and [`Session::next_call`].
pub fn serve<E: Display>(mut function: impl FnMut(&Call) -> Result<(), E>) -> Result<(), Error> {
    let session = Session::open()?;
    while let Some(call) = session.next_call()? {
        match function(&call) {
            Ok(()) => call.finish()?,
            Err(error) => call.fail(&error.to_string())?,
        }
    }
    Ok(())
}
