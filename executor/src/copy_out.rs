//! Copies from the GPU's memory to the host's, on the copy thread: of objects, and of outputs that
//! are kept.

use std::os::fd::{AsFd as _, OwnedFd};

use millrace_device::{Device, Error as DeviceError, Source, Stream as _};
use millrace_proto::executor::copy_out::Source as Named;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{self as wire_messages, CopiedOut, CopyOutFailed};

use crate::events::clip;
use crate::kept::{self, OutputBytes};
use crate::mapping::Use;
use crate::objects::{self, ObjectBytes, Objects};
use crate::process::Shared;
use crate::wire::{self, Descriptors};

/// One copy.
#[derive(Debug)]
pub(crate) struct CopyOut<D: Device> {
    copy: u64,
    from: From<D>,
    to: OwnedFd,
}

#[derive(Debug)]
enum From<D: Device> {
    /// Its memory stays until this is done.
    Object(ObjectBytes<D>, Use<D>),
    Output(OutputBytes<D::Value>),
}

/// A copy that cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("it names nothing to copy")]
    NoSource,
    #[error(transparent)]
    Message(#[from] wire::Error),
    #[error(transparent)]
    Object(#[from] objects::Error),
    #[error(transparent)]
    Output(#[from] kept::Error),
}

impl<D: Device> CopyOut<D> {
    pub(crate) fn new(
        message: wire_messages::CopyOut,
        shared: &Shared<D>,
        objects: &Objects<D>,
        mut descriptors: Descriptors,
    ) -> Result<Self, Error> {
        let from = match message.source.ok_or(Error::NoSource)? {
            Named::Object(part) => {
                let (bytes, using) = objects.part(part)?;
                From::Object(bytes, using)
            }
            Named::Output(part) => From::Output(shared.kept.find(part)?),
        };
        Ok(Self { copy: message.copy, from, to: descriptors.take(message.contents_fd)? })
    }

    /// Makes it, and says what came of that.
    pub(crate) fn carry_out(self, shared: &Shared<D>, stream: &mut D::Stream) -> Event {
        let copied = match &self.from {
            From::Object(ObjectBytes { object, bytes }, _using) => {
                stream.copy_out(Source::Region(&object.mapping.region), bytes.clone(), self.to.as_fd())
            }
            From::Output(OutputBytes { output, bytes }) => {
                let source = Source::Value(&output.value, output.datatype);
                stream.copy_out(source, bytes.clone(), self.to.as_fd())
            }
        };
        match copied {
            Ok(()) => Event::CopiedOut(CopiedOut { copy: self.copy }),
            Err(error) => {
                if let DeviceError::Lost(message) = &error {
                    shared.events.device_failed(message);
                }
                refused(self.copy, error)
            }
        }
    }
}

/// The event for a copy that was not made.
pub(crate) fn refused(copy: u64, why: impl ToString) -> Event {
    Event::CopyOutFailed(CopyOutFailed { copy, message: clip(why) })
}
