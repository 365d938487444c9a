//! The socket to the worker, which a session shares with the calls. Calls arrive one after another, and
//! a call's messages to the worker cross the same socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use millrace_proto::frames::{FrameDecoder, FrameQueue, SocketFrame};
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::function::to_process::Message as Heard;
use millrace_proto::function::{Call, FromProcess, Ready, TakeIds, ToProcess};
use millrace_proto::{BUILD, FUNCTION_PROTOCOL_VERSION};
use millrace_types::DataId;

use crate::error::Error;
use crate::ids::Ids;

/// The state that a session shares with the calls.
#[derive(Debug)]
pub(crate) struct SessionState {
    /// The socket. The lock is held for a message and the reply, so calls send one message at a
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

/// A message that arrived, and the descriptors that arrived with it.
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

    /// Waits for the next message. Returns `None` when the worker has closed the socket.
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
    /// Greets the worker over this socket.
    pub(crate) fn greet(socket: OwnedFd) -> Result<Self, Error> {
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
        Ok(Self { link: Mutex::new(link), ids })
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        // A message is sent whole or not at all, so a poisoned link is still valid, or the socket
        // reports an error.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next call, and returns the call with the message that brought it. Returns `None` when
    /// the worker has closed the socket.
    pub(crate) fn receive_call(&self) -> Result<Option<(Call, ReceivedMessage)>, Error> {
        let mut link = self.link();
        if link.open.is_some() {
            return Err(Error::CallUnanswered);
        }
        let Some(mut arrived) = link.receive()? else { return Ok(None) };
        let Heard::Call(call) = &mut arrived.message else {
            return Err(Error::Protocol("the message is not a call"));
        };
        let call = std::mem::take(call);
        link.open = Some(call.call);
        Ok(Some((call, arrived)))
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
