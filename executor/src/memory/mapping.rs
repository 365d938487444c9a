//! The memory under a program or an object: its region, the mapping of the region, and the users of
//! the mapping.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use millrace_device::{
    Device as _, DeviceLoss, Error as DeviceError, MemoryExtent, MissingBytes, Stream as _,
};
use millrace_engine::{DeviceEvent, Engine, Region, Stream};
use millrace_proto::executor::Unmapped;
use millrace_proto::executor::event::Event;

use crate::memory::executor_state::ExecutorState;
use crate::memory::mapping_state::{MappingState, StepRefusal, UnmapAction};
use crate::memory::object_reports::ObjectReports;

/// Owner of the memory.
#[derive(Debug)]
pub(crate) enum MappingOwner {
    Program(u64),
    /// An object, which is mapped only once.
    Object(u64, Arc<ObjectReports>),
}

/// Generation of an object's only mapping.
pub(crate) const OBJECT_GENERATION: u64 = 1;

/// A region with its mapping, shared by all copies and runs that use it.
#[derive(Debug)]
pub(crate) struct RegionMapping<E: Engine> {
    shared: Arc<ExecutorState<E>>,
    of: MappingOwner,
    pub(crate) region: Region<E>,
    residency: Mutex<MappingState>,
    /// Signalled when copies were issued or the mapping changed.
    changed: Condvar,
}

/// Reason why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MapError {
    #[error(transparent)]
    Refused(#[from] StepRefusal),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl<E: Engine> RegionMapping<E> {
    /// Creates an unmapped region's state.
    pub(crate) fn new(shared: Arc<ExecutorState<E>>, of: MappingOwner, region: Region<E>) -> Self {
        Self { shared, of, region, residency: Mutex::default(), changed: Condvar::new() }
    }

    /// Maps physical memory into the region.
    pub(crate) fn map(&self, generation: u64, extents: Vec<(u64, MemoryExtent)>) -> Result<(), MapError> {
        let mut residency = self.residency();
        residency.map(generation)?;
        let device = self.shared.device();
        let chunks = extents.into_iter().map(|(at, extent)| Ok((at, device.create(extent)?)));
        let mapped =
            chunks.collect::<Result<_, DeviceError>>().and_then(|chunks| device.map(&self.region, chunks));
        if let Err(error) = mapped {
            residency.map_failed();
            return Err(error.into());
        }
        Ok(())
    }

    /// Unmaps the memory, now or when the last user is done. Wakes the launches that wait for the memory.
    pub(crate) fn unmap(&self, generation: u64) {
        let mut residency = self.residency();
        let unmapping = residency.unmap(generation);
        self.carry_out(residency, unmapping);
    }

    /// Unmaps any mapping like [`Self::unmap`], because the program is unloaded.
    pub(crate) fn unmap_any(&self) {
        let mut residency = self.residency();
        let unmapping = residency.retire();
        self.carry_out(residency, unmapping);
    }

    fn carry_out(&self, residency: MutexGuard<'_, MappingState>, unmapping: UnmapAction) {
        self.changed.notify_all();
        match unmapping {
            UnmapAction::Now(generation) => self.release(residency, generation),
            UnmapAction::Already(generation) => {
                drop(residency);
                self.say_unmapped(generation);
            }
            UnmapAction::Later | UnmapAction::Ignored => {}
        }
    }

    /// Unmaps the memory under the lock. Other threads that see the unmapped state report the state or map
    /// again, so the memory must already be gone by then.
    fn release(&self, residency: MutexGuard<'_, MappingState>, generation: u64) {
        // The device sees the same users as the residency, and the residency has none.
        let unmapped = self.shared.device().unmap(&self.region);
        drop(residency);
        match unmapped {
            Ok(()) => match &self.of {
                MappingOwner::Program(_) => self.say_unmapped(generation),
                MappingOwner::Object(object, fate) => {
                    fate.record_unmapped(*object, |event| self.shared.events.send(event))
                }
            },
            // The GPU works, so only this process must end.
            Err(error) => {
                let message = format!("memory cannot be unmapped: {error}");
                self.shared.events.device_failed(error.loss().unwrap_or(DeviceLoss::Context), &message);
            }
        }
    }

    fn say_unmapped(&self, generation: u64) {
        match &self.of {
            &MappingOwner::Program(program) => {
                self.shared.events.send(Event::Unmapped(Unmapped { program, generation }));
            }
            MappingOwner::Object(object, fate) => {
                fate.send_if_unmapped(*object, |event| self.shared.events.send(event))
            }
        }
    }

    /// Records that the device is gone, and wakes all waiting launches, which then fail.
    pub(crate) fn lose(&self, message: &str) {
        self.residency().lose(message);
        self.changed.notify_all();
    }

    /// Uses the mapping for a launch that reads these bytes. Returns `None` if the bytes are not loaded.
    pub(crate) fn use_loaded(
        self: &Arc<Self>,
        generation: u64,
        reads: &[Range<u64>],
    ) -> Result<Option<MappingUse<E>>, StepRefusal> {
        let mut residency = self.residency();
        self.check_that(&residency, generation)?;
        Ok(self.missing(reads).is_none().then(|| self.enter(&mut residency)))
    }

    /// Waits until the copies of these bytes are issued, and lets the later work of the stream wait
    /// until the copies have finished. Uses the mapping for a launch that reads the bytes.
    pub(crate) fn wait_issued(
        self: &Arc<Self>,
        generation: u64,
        reads: &[Range<u64>],
        stream: &mut Stream<E>,
    ) -> Result<MappingUse<E>, StepRefusal> {
        loop {
            let (using, copies) = self.wait_copies(generation, reads)?;
            // A copy that fails makes its bytes missing again. The next round then waits for another
            // copy, or fails because there will be none.
            if copies.iter().all(|copy| stream.after(copy).is_ok()) {
                return Ok(using);
            }
        }
    }

    /// Waits until the copies of these bytes are issued. Returns the copies that have not finished.
    fn wait_copies(
        self: &Arc<Self>,
        generation: u64,
        reads: &[Range<u64>],
    ) -> Result<(MappingUse<E>, Vec<DeviceEvent<E>>), StepRefusal> {
        let mut residency = self.residency();
        loop {
            self.check_that(&residency, generation)?;
            if let Some(copies) = self.issued(reads) {
                return Ok((self.enter(&mut residency), copies));
            }
            reads.iter().try_for_each(|read| residency.check_awaitable(read.clone()))?;
            residency = self.changed.wait(residency).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the copies of these bytes that have not finished, or `None` if some are not issued.
    fn issued(&self, reads: &[Range<u64>]) -> Option<Vec<DeviceEvent<E>>> {
        let mut copies = Vec::new();
        for read in reads {
            match self.shared.device().missing(&self.region, read.clone()) {
                None => {}
                Some(MissingBytes::Issued(events)) => copies.extend(events),
                Some(MissingBytes::NotIssued(_)) => return None,
            }
        }
        Some(copies)
    }

    /// Uses the mapping, whether or not the bytes are loaded.
    pub(crate) fn use_mapped(self: &Arc<Self>, generation: u64) -> Result<MappingUse<E>, StepRefusal> {
        let mut residency = self.residency();
        self.check_that(&residency, generation)?;
        Ok(self.enter(&mut residency))
    }

    /// Checks that work for this generation may continue.
    pub(crate) fn check(&self, generation: u64) -> Result<(), StepRefusal> {
        self.check_that(&self.residency(), generation)
    }

    fn check_that(&self, residency: &MappingState, generation: u64) -> Result<(), StepRefusal> {
        residency.check(generation).map_err(|refusal| match (&self.of, refusal) {
            (&MappingOwner::Object(object, _), StepRefusal::NotMapped(_)) => StepRefusal::Freed(object),
            (_, refusal) => refusal,
        })
    }

    /// Records that a copy of these bytes was accepted.
    pub(crate) fn expect_copy(&self, ranges: &[Range<u64>]) {
        let mut residency = self.residency();
        ranges.iter().for_each(|range| residency.expect(range.clone()));
    }

    /// Returns the first of these ranges that is not loaded, or the part of it that no copy was
    /// issued for.
    pub(crate) fn missing(&self, reads: &[Range<u64>]) -> Option<Range<u64>> {
        reads.iter().find_map(|read| match self.shared.device().missing(&self.region, read.clone())? {
            MissingBytes::NotIssued(gap) => Some(gap),
            MissingBytes::Issued(_) => Some(read.clone()),
        })
    }

    fn enter(self: &Arc<Self>, residency: &mut MappingState) -> MappingUse<E> {
        residency.enter();
        MappingUse { mapping: Arc::clone(self) }
    }

    fn residency(&self) -> MutexGuard<'_, MappingState> {
        // Ignores a poisoned lock: no foreign code runs under the lock, so the state is consistent.
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A launch or copy that uses a mapping. The mapping stays until this value is dropped.
#[derive(Debug)]
pub(crate) struct MappingUse<E: Engine> {
    mapping: Arc<RegionMapping<E>>,
}

impl<E: Engine> MappingUse<E> {
    pub(crate) fn region(&self) -> &Region<E> {
        &self.mapping.region
    }

    /// Wakes the waiting launches, because more copies are issued.
    pub(crate) fn issued_more(&self) {
        // Notifies under the lock. Otherwise a launch could check before the copy was issued, and start
        // to wait after this notification.
        let _residency = self.mapping.residency();
        self.mapping.changed.notify_all();
    }

    /// Records that the copy of these bytes failed, and wakes the launches that wait for the bytes.
    pub(crate) fn failed(&self, ranges: &[Range<u64>]) {
        let mut residency = self.mapping.residency();
        ranges.iter().for_each(|range| residency.fail(range.clone()));
        self.mapping.changed.notify_all();
    }
}

impl<E: Engine> Drop for MappingUse<E> {
    fn drop(&mut self) {
        let mut residency = self.mapping.residency();
        if let Some(generation) = residency.leave() {
            self.mapping.release(residency, generation);
        }
    }
}
