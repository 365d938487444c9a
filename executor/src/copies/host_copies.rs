//! Copies of objects and kept outputs from the GPU's memory to the host, on a thread of their own. A
//! copy is made at once, or batch by batch under grants ([`CopyBatch`](crate::copies::copy_batch::CopyBatch)) in any order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use millrace_device::{CopySource, Device as _, Event as _, Stream as _};
use millrace_engine::{Engine, Error as EngineError, Stream};
use millrace_proto::executor::copy_out::Source as Named;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{self as wire_messages, CopiedOut, CopyOutFailed};
use millrace_types::Timestamp;

use crate::copies::pieces::pieces;
use crate::memory::executor_state::ExecutorState;
use crate::memory::kept_outputs::{self, KeptOutputBytes};
use crate::memory::mapping::MappingUse;
use crate::memory::objects::{self, ObjectBytes, ObjectTable};
use crate::socket::conversions::{self, FrameDescriptors};
use crate::socket::events::clip;

/// Most granted copies to the host at a time. Each copy keeps a descriptor open, and the source alive.
const COPIES_OUT_MAX: usize = 4096;

/// The source and the target of a copy to the host. The bytes are written to the start of the target.
/// The source stays alive as long as this value.
#[derive(Debug)]
pub(crate) struct CopyToHost<E: Engine> {
    from: HostCopySource<E>,
    to: OwnedFd,
}

#[derive(Debug)]
enum HostCopySource<E: Engine> {
    /// The use keeps the object's memory mapped.
    Object(ObjectBytes<E>, MappingUse<E>),
    Output(KeptOutputBytes<E::Value>),
}

/// Reason why a copy to the host cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the copy names no object and no output: name one of them")]
    NoSource,
    #[error("copy {0} to the host is under way already")]
    Twice(u64),
    #[error("{COPIES_OUT_MAX} copies to the host are under way: end one first")]
    TooMany,
    #[error(transparent)]
    Message(#[from] conversions::Error),
    #[error(transparent)]
    Object(#[from] objects::Error),
    #[error(transparent)]
    Output(#[from] kept_outputs::Error),
}

impl<E: Engine> CopyToHost<E> {
    pub(crate) fn new(
        message: wire_messages::CopyOut,
        shared: &ExecutorState<E>,
        objects: &ObjectTable<E>,
        mut descriptors: FrameDescriptors,
    ) -> Result<Self, Error> {
        let from = match message.source.ok_or(Error::NoSource)? {
            Named::Object(part) => {
                let (bytes, using) = objects.part(part)?;
                HostCopySource::Object(bytes, using)
            }
            Named::Output(part) => HostCopySource::Output(shared.kept.find(part)?),
        };
        Ok(Self { from, to: descriptors.take(message.contents_fd)? })
    }

    /// Returns the number of bytes to copy.
    pub(crate) fn len(&self) -> u64 {
        let all = match &self.from {
            HostCopySource::Object(ObjectBytes { bytes, .. }, _)
            | HostCopySource::Output(KeptOutputBytes { bytes, .. }) => bytes,
        };
        all.end - all.start
    }

    /// Copies a part of the bytes, at most the device's largest copy. Returns the time at which the
    /// bytes arrived.
    pub(crate) fn copy(
        &self,
        engine: &E,
        stream: &mut Stream<E>,
        part: Range<u64>,
    ) -> Result<Timestamp, EngineError> {
        let within = |all: &Range<u64>| all.start + part.start..all.start + part.end;
        let to = self.to.as_fd();
        let at = part.start;
        match &self.from {
            HostCopySource::Object(ObjectBytes { object, bytes }, _using) => {
                stream.copy_out(CopySource::Region(&object.mapping.region, within(bytes)), to, at)?;
            }
            HostCopySource::Output(KeptOutputBytes { output, bytes }) => {
                let lent = engine.lend(&output.value, output.datatype, within(bytes))?;
                stream.copy_out(CopySource::Bytes(lent), to, at)?;
            }
        }
        Ok(stream.record()?.wait()?)
    }
}

/// A copy to the host without grants.
#[derive(Debug)]
pub(crate) struct ImmediateHostCopy<E: Engine> {
    pub(crate) copy: u64,
    pub(crate) bytes: CopyToHost<E>,
}

impl<E: Engine> ImmediateHostCopy<E> {
    /// Makes the copy, and returns the event for the outcome.
    pub(crate) fn carry_out(self, shared: &ExecutorState<E>, stream: &mut Stream<E>) -> Event {
        let Self { copy, bytes } = self;
        let most = shared.device().capabilities().copy_max.get();
        match pieces(0..bytes.len(), most)
            .try_for_each(|piece| bytes.copy(&shared.engine, stream, piece).map(drop))
        {
            Ok(()) => Event::CopiedOut(CopiedOut { copy }),
            Err(error) => {
                shared.events.report_loss(&error);
                refused(copy, error)
            }
        }
    }
}

/// Returns the event for a copy that was not made.
pub(crate) fn refused(copy: u64, why: impl ToString) -> Event {
    Event::CopyOutFailed(CopyOutFailed { copy, message: clip(why) })
}

/// The copies to the host under grants, by their id.
#[derive(Debug)]
pub(crate) struct GrantedHostCopies<E: Engine>(BTreeMap<u64, Arc<CopyToHost<E>>>);

impl<E: Engine> GrantedHostCopies<E> {
    pub(crate) fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(crate) fn begin(&mut self, copy: u64, bytes: CopyToHost<E>) -> Result<(), Error> {
        if self.0.contains_key(&copy) {
            return Err(Error::Twice(copy));
        }
        if self.0.len() >= COPIES_OUT_MAX {
            return Err(Error::TooMany);
        }
        self.0.insert(copy, Arc::new(bytes));
        Ok(())
    }

    pub(crate) fn get(&self, copy: u64) -> Option<&Arc<CopyToHost<E>>> {
        self.0.get(&copy)
    }

    /// Forgets a copy. Queued batches keep the copy alive.
    pub(crate) fn end(&mut self, copy: u64) {
        self.0.remove(&copy);
    }
}
