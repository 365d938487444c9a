//! The socket to the worker: one call after another comes over it, and what a call asks meanwhile.

use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_proto::frames::{Frame, FrameDecoder, Outbox};
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::function::to_process::Message as Heard;
use millrace_proto::function::{FromProcess, Ready, TakeIds, ToProcess};
use millrace_proto::{BUILD, FUNCTION_PROTOCOL_VERSION};
use millrace_types::DataId;

use crate::call::Call;
use crate::error::Error;
use crate::ids::Ids;

/// A process's tie to its worker.
#[derive(Debug)]
pub struct Session(Arc<Shared>);

/// What the session and its calls share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Held for a message and its answer: calls ask one thing at a time.
    link: Mutex<Link>,
    ids: Ids,
}

#[derive(Debug)]
struct Link {
    socket: OwnedFd,
    decoder: FrameDecoder,
    outbox: Outbox,
    /// The call that is not answered yet.
    open: Option<u64>,
}

/// What arrived, and the descriptors with it.
pub(crate) struct Arrived {
    pub(crate) message: Heard,
    descriptors: VecDeque<Option<OwnedFd>>,
}

impl Arrived {
    /// A descriptor that came with it. Each is taken once.
    pub(crate) fn take(&mut self, place: u32) -> Result<OwnedFd, Error> {
        let fd = self.descriptors.get_mut(place as usize).and_then(Option::take);
        fd.ok_or(Error::Protocol("a descriptor did not come"))
    }
}

impl Link {
    fn send(&mut self, message: Said, descriptors: Vec<OwnedFd>) -> Result<(), Error> {
        let frame = Frame::new(&FromProcess { message: Some(message) }, descriptors).map_err(broken)?;
        self.outbox.push(frame).map_err(broken)?;
        self.outbox.flush(&self.socket).map_err(Error::Socket)
    }

    /// `None` when the worker has closed its end.
    fn receive(&mut self) -> Result<Option<Arrived>, Error> {
        let frame = match self.decoder.recv_frame(&self.socket) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(Error::Socket(error)),
        };
        let message: ToProcess = frame.decode().map_err(broken)?;
        let message = message.message.ok_or(Error::Protocol("a message without content"))?;
        let descriptors = frame.descriptors.into_iter().map(Some).collect();
        Ok(Some(Arrived { message, descriptors }))
    }
}

fn broken(error: millrace_proto::frames::Error) -> Error {
    Error::Socket(error.into())
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Link> {
        // A message is whole or not sent: a poisoned link is still good, or the socket says so.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the call that is open.
    pub(crate) fn answer(&self, message: Said, descriptors: Vec<OwnedFd>) -> Result<(), Error> {
        let mut link = self.link();
        link.open = None;
        link.send(message, descriptors)
    }

    /// Asks something for a call. Once that is answered, the next message may be another call.
    pub(crate) fn ask(&self, call: u64, message: Said, descriptors: Vec<OwnedFd>) -> Result<Arrived, Error> {
        let mut link = self.link();
        if link.open != Some(call) {
            return Err(Error::Answered);
        }
        link.send(message, descriptors)?;
        link.receive()?.ok_or_else(|| Error::Socket(io::ErrorKind::UnexpectedEof.into()))
    }

    /// The registration is over under which our names were given: the next one is of a new block.
    pub(crate) fn distrust_ids(&self) {
        self.ids.forget();
    }

    /// A name that nothing else has. Asks the worker only once in many million times.
    pub(crate) fn unique_id(&self, call: u64) -> Result<DataId, Error> {
        if let Some(id) = self.ids.take() {
            return Ok(id);
        }
        let Heard::Ids(block) = self.ask(call, Said::TakeIds(TakeIds {}), Vec::new())?.message else {
            return Err(Error::Protocol("another answer than ids"));
        };
        self.ids.refill(block);
        self.ids.take().ok_or(Error::NoIds)
    }
}

impl Session {
    /// Greets the worker that started this process, whose socket is standard input. That is empty from
    /// here on, so that no program started by this one reads what the worker says.
    ///
    /// # Errors
    /// [`Error::Socket`] where no worker started it, [`Error::Version`] where that is of another
    /// version.
    pub fn open() -> Result<Self, Error> {
        let socket = io::stdin().as_fd().try_clone_to_owned().map_err(Error::Socket)?;
        let nothing = File::open("/dev/null").map_err(Error::Socket)?;
        rustix::stdio::dup2_stdin(&nothing).map_err(|error| Error::Socket(error.into()))?;
        Self::over(socket)
    }

    /// The same over another socket.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn over(socket: OwnedFd) -> Result<Self, Error> {
        let mut link =
            Link { socket, decoder: FrameDecoder::default(), outbox: Outbox::default(), open: None };
        let closed = || Error::Socket(io::ErrorKind::UnexpectedEof.into());
        let Heard::Hello(hello) = link.receive()?.ok_or_else(closed)?.message else {
            return Err(Error::Protocol("it did not greet"));
        };
        if hello.protocol_version != FUNCTION_PROTOCOL_VERSION {
            return Err(Error::Version { theirs: hello.protocol_version, build: hello.build });
        }
        let ids = Ids::default();
        ids.refill(hello.ids.unwrap_or_default());
        let ready = Ready { protocol_version: FUNCTION_PROTOCOL_VERSION, build: BUILD.to_owned() };
        link.send(Said::Ready(ready), Vec::new())?;
        Ok(Self(Arc::new(Shared { link: Mutex::new(link), ids })))
    }

    /// Waits for the next call; `None` when the worker wants no more of this process. The call before
    /// it is to be answered first.
    ///
    /// # Errors
    /// [`Error::Open`] before that; [`Error::Socket`], [`Error::Protocol`]: end the process then.
    pub fn next_call(&self) -> Result<Option<Call>, Error> {
        let mut link = self.0.link();
        if link.open.is_some() {
            return Err(Error::Open);
        }
        let Some(mut arrived) = link.receive()? else { return Ok(None) };
        let Heard::Call(call) = &mut arrived.message else {
            return Err(Error::Protocol("something else than a call"));
        };
        let call = std::mem::take(call);
        link.open = Some(call.call);
        drop(link);
        Call::new(Arc::clone(&self.0), call, arrived).map(Some)
    }
}

/// Serves calls until the worker wants no more: what the main function of a program does. What the
/// function returns as an error is the caller's answer; where it panics, the process ends, and the
/// worker starts another.
///
/// # Errors
/// As [`Session::open`] and [`Session::next_call`].
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
