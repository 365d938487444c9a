//! Objects: tensors in the GPU's memory under an id that the worker chose, which runs read in place.
//! Each object has a region of its own, which is mapped once.
//!
//! ```text
//! PlaceObject ─> mapped ─ output: filled on the copy thread ─> ObjectPlaced ─> runs, copies out
//!                  │      else: ObjectPlaced, the bytes come by Copy                   │
//!                  └─ PlaceFailed                             FreeObject ─> ObjectFreed
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millrace_device::{Device as _, Error as DeviceError, Event as _, MemoryExtent, RangeSet, Stream as _};
use millrace_engine::{Engine, Region, Stream};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{ObjectFreed, ObjectPart, PlaceObject};
use millrace_types::Bytes;

use crate::memory::executor_state::ExecutorState;
use crate::memory::kept_outputs::{self, KeptOutputBytes};
use crate::memory::mapping::{MapError, MappingOwner, MappingUse, OBJECT_GENERATION, RegionMapping};
use crate::memory::mapping_state::StepRefusal;
use crate::memory::object_reports::{self, ObjectReports};
use crate::socket::conversions::{self, FrameDescriptors};

/// Most objects at a time. Each object has a few mappings, and may keep a descriptor.
pub const OBJECTS_MAX: usize = 4096;

/// An object on the GPU.
#[derive(Debug)]
pub(crate) struct GpuObject<E: Engine> {
    id: u64,
    pub(crate) bytes: u64,
    pub(crate) mapping: Arc<RegionMapping<E>>,
    /// Host memory that copies from the host read.
    pub(crate) host: Option<OwnedFd>,
    fate: Arc<ObjectReports>,
}

/// All objects by id. An object that was freed while in use stays in the map until the next object is
/// placed, or until it is freed again.
#[derive(Debug)]
pub(crate) struct ObjectTable<E: Engine>(BTreeMap<u64, Arc<GpuObject<E>>>);

/// A byte range of an object.
#[derive(Debug)]
pub(crate) struct ObjectBytes<E: Engine> {
    pub(crate) object: Arc<GpuObject<E>>,
    pub(crate) bytes: Range<u64>,
}

/// Reason why an object cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("object {0} is not there: place it first")]
    Unknown(u64),
    #[error("{bytes} bytes at {offset} are past the end of object {object}, which has {size}")]
    Range { object: u64, offset: u64, bytes: u64, size: u64 },
    #[error("object {object} is not all loaded: bytes {missing:?} are not there")]
    NotLoaded { object: u64, missing: Range<u64> },
    #[error(transparent)]
    Refused(#[from] StepRefusal),
}

/// Reason why an object was not placed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlaceError {
    #[error("object {0} is there already")]
    Twice(u64),
    #[error("{OBJECTS_MAX} objects are there: free one first")]
    TooMany,
    #[error("the object's extents do not cover bytes {0:?}")]
    NotCovered(Range<u64>),
    #[error("the object has {bytes} bytes, but {output} bytes of an output are to fill it")]
    Size { bytes: u64, output: u64 },
    #[error(transparent)]
    Message(#[from] conversions::Error),
    #[error(transparent)]
    Output(#[from] kept_outputs::Error),
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl<E: Engine> GpuObject<E> {
    fn missing(&self) -> Option<Range<u64>> {
        self.mapping.missing(std::slice::from_ref(&(0..self.bytes)))
    }

    /// Whether the object was freed or its placement failed, and its memory is unmapped.
    fn is_gone(&self) -> bool {
        self.fate.ends().away
    }
}

impl<E: Engine> ObjectBytes<E> {
    /// Checks that the whole object is loaded.
    pub(crate) fn check_loaded(&self) -> Result<(), Error> {
        let object = self.object.id;
        self.object.missing().map_or(Ok(()), |missing| Err(Error::NotLoaded { object, missing }))
    }

    pub(crate) fn region(&self) -> &Region<E> {
        &self.object.mapping.region
    }
}

impl<E: Engine> ObjectTable<E> {
    pub(crate) fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Maps an object's memory. Filling the object from an output is left to the copy thread.
    pub(crate) fn place(
        &mut self,
        shared: &Arc<ExecutorState<E>>,
        message: PlaceObject,
        mut descriptors: FrameDescriptors,
    ) -> Result<Option<ObjectFill<E>>, PlaceError> {
        self.0.retain(|_, object| !object.is_gone());
        let PlaceObject { object: id, bytes, extents, output, has_host, host_fd } = message;
        if self.0.contains_key(&id) {
            return Err(PlaceError::Twice(id));
        }
        if self.0.len() >= OBJECTS_MAX {
            return Err(PlaceError::TooMany);
        }
        let output = output.map(|part| shared.kept.find(part)).transpose()?;
        if let Some(KeptOutputBytes { bytes: part, .. }) = &output
            && part.end - part.start != bytes
        {
            return Err(PlaceError::Size { bytes, output: part.end - part.start });
        }
        let host = has_host.then(|| descriptors.take(host_fd)).transpose()?;
        let extents: Vec<_> = extents.into_iter().map(conversions::extent).collect();
        covered(&extents, bytes)?;
        // The last extent may be larger than the object.
        let end = extents.iter().map(|&(at, extent)| at.saturating_add(extent.bytes)).max();
        let region = shared.device().reserve(Bytes(end.unwrap_or_default().max(bytes)))?;
        let fate = Arc::<ObjectReports>::default();
        let mapping =
            RegionMapping::new(Arc::clone(shared), MappingOwner::Object(id, Arc::clone(&fate)), region);
        mapping.map(OBJECT_GENERATION, extents)?;
        let object = Arc::new(GpuObject { id, bytes, mapping: Arc::new(mapping), host, fate });
        let using = object.mapping.use_mapped(OBJECT_GENERATION).map_err(MapError::from)?;
        self.0.insert(id, Arc::clone(&object));
        Ok(output.map(|output| ObjectFill { object, using, output }))
    }

    /// Returns an object. The object may be about to be freed.
    pub(crate) fn get(&self, id: u64) -> Result<&Arc<GpuObject<E>>, Error> {
        self.0.get(&id).ok_or(Error::Unknown(id))
    }

    /// Returns bytes of an object. The bytes stay mapped as long as the returned use.
    pub(crate) fn part(&self, part: ObjectPart) -> Result<(ObjectBytes<E>, MappingUse<E>), Error> {
        let ObjectPart { object, offset, bytes } = part;
        let found = self.get(object)?;
        let end = offset.checked_add(bytes).filter(|&end| end <= found.bytes);
        let end = end.ok_or(Error::Range { object, offset, bytes, size: found.bytes })?;
        let using = found.mapping.use_mapped(OBJECT_GENERATION)?;
        Ok((ObjectBytes { object: Arc::clone(found), bytes: offset..end }, using))
    }

    /// Unmaps an object's memory when the last user is done, and then reports that the object is
    /// freed. Reports at once if the object does not exist.
    pub(crate) fn free(&mut self, shared: &ExecutorState<E>, id: u64) {
        let Some(object) = self.0.get(&id) else {
            return shared.events.send(Event::ObjectFreed(ObjectFreed { object: id }));
        };
        object.fate.ends().freed = true;
        object.mapping.unmap(OBJECT_GENERATION);
        if object.is_gone() {
            self.0.remove(&id);
        }
    }

    /// Records that the device is gone.
    pub(crate) fn lose(&self, message: &str) {
        self.0.values().for_each(|object| object.mapping.lose(message));
    }
}

/// Checks that the extents cover all bytes of an object.
fn covered(extents: &[(u64, MemoryExtent)], bytes: u64) -> Result<(), PlaceError> {
    let mut covered = RangeSet::default();
    extents.iter().for_each(|&(at, extent)| covered.insert(at..at.saturating_add(extent.bytes)));
    covered.first_gap(0..bytes).map_or(Ok(()), |gap| Err(PlaceError::NotCovered(gap)))
}

/// A mapped object that is to be filled from an output.
#[derive(Debug)]
pub(crate) struct ObjectFill<E: Engine> {
    object: Arc<GpuObject<E>>,
    using: MappingUse<E>,
    output: KeptOutputBytes<E::Value>,
}

impl<E: Engine> ObjectFill<E> {
    /// Fills the object, and reports the outcome.
    pub(crate) fn carry_out(self, shared: &ExecutorState<E>, stream: &mut Stream<E>) {
        let KeptOutputBytes { output, bytes } = &self.output;
        let lent = shared.engine.lend(&output.value, output.datatype, bytes.clone());
        let region = self.using.region();
        let filled = lent.and_then(|lent| {
            stream.fill(region, lent)?;
            // The output must stay until the copy has finished, and the object must be loaded when the
            // worker learns of it.
            Ok(stream.record()?.wait()?)
        });
        match filled {
            Ok(_) => shared.events.send(object_reports::placed(self.object.id)),
            Err(error) => {
                shared.events.report_loss(&error);
                self.fail(error);
            }
        }
    }

    /// Fails the placement: unmaps the object's memory, and then reports the error.
    pub(crate) fn fail(self, why: impl ToString) {
        let Self { object, using, .. } = self;
        object.fate.ends().failed = Some(why.to_string());
        object.mapping.unmap(OBJECT_GENERATION);
        drop(using);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_must_cover_an_object_without_gaps() {
        let extent = |at, bytes| (at, MemoryExtent { offset: 0, bytes });
        let gap = |extents: &[(u64, MemoryExtent)]| match covered(extents, 10) {
            Err(PlaceError::NotCovered(gap)) => Some(gap),
            _ => None,
        };
        assert_eq!(gap(&[extent(4, 8), extent(0, 4)]), None);
        assert_eq!(gap(&[]), Some(0..10));
        assert_eq!(gap(&[extent(0, 4), extent(5, 8)]), Some(4..5));
        assert_eq!(gap(&[extent(0, 9)]), Some(9..10));
    }
}
