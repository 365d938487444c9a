//! The requests of object handles to the Gpu actor that has the object, and the replies with bytes.

use std::fmt;

use millrace_core::ids::ObjectKey;
use millrace_proto::executor::ObjectPart;
use tokio::sync::oneshot;

use super::reader::TransferReader;
use crate::port::Descriptor;

/// A request of an object's handle to the object's Gpu actor.
pub(crate) enum ObjectRequest {
    /// A request that reads an object joined the node's queue at this rank, or left the queue.
    ReaderQueued { object: ObjectKey, place: u64, waits: bool },
    /// A reader asks for a part of an object in host memory.
    Fetch { part: ObjectPart, reader: TransferReader, reply: Reply },
    /// The last handle of an object was dropped.
    Discard(ObjectKey),
}

/// The error of an access to a lost object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the object was lost with its GPU's executor")]
pub(crate) struct ObjectLost;

/// Host memory with bytes of an object, and the offset of the first byte.
pub(crate) type HostBytes = Result<(Descriptor, u64), ObjectLost>;

/// The destination of requested bytes. A destination that is dropped unused receives [`ObjectLost`].
pub(crate) struct Reply(Option<To>);

enum To {
    /// A callback, which is called in any case.
    Told(Box<dyn FnOnce(HostBytes) + Send>),
    /// A task that waits, and may give up.
    Awaited(oneshot::Sender<HostBytes>),
}

impl Reply {
    pub(crate) fn new(reply: impl FnOnce(HostBytes) + Send + 'static) -> Self {
        Self(Some(To::Told(Box::new(reply))))
    }

    pub(super) fn awaited(answer: oneshot::Sender<HostBytes>) -> Self {
        Self(Some(To::Awaited(answer)))
    }

    /// Whether the waiting task has given up.
    pub(crate) fn is_given_up(&self) -> bool {
        matches!(&self.0, Some(To::Awaited(answer)) if answer.is_closed())
    }

    pub(crate) fn send(mut self, found: HostBytes) {
        self.tell(found);
    }

    fn tell(&mut self, found: HostBytes) {
        match self.0.take() {
            Some(To::Told(reply)) => reply(found),
            // The waiting task may have given up.
            Some(To::Awaited(answer)) => answer.send(found).unwrap_or_default(),
            None => {}
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.tell(Err(ObjectLost));
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}
