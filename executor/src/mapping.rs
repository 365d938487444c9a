//! The memory under a program or an object: its region, what is mapped there, and who uses it when.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use millrace_device::{Device, Error as DeviceError, Extent};
use millrace_proto::executor::Unmapped;
use millrace_proto::executor::event::Event;

use crate::objects::Fate;
use crate::process::Shared;
use crate::residency::{Refusal, Residency, Unmapping};

/// Whose memory it is.
#[derive(Debug)]
pub(crate) enum Of {
    Program(u64),
    /// It is mapped once in its life.
    Object(u64, Arc<Fate>),
}

/// The generation of an object's only mapping.
pub(crate) const OBJECT_GENERATION: u64 = 1;

/// A region and what is under it, shared by whatever copies and runs use it.
#[derive(Debug)]
pub(crate) struct Mapping<D: Device> {
    shared: Arc<Shared<D>>,
    of: Of,
    pub(crate) region: D::Region,
    residency: Mutex<Residency>,
    /// Bytes were loaded, or the mapping changed.
    changed: Condvar,
}

/// Why memory could not be put under a region.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MapError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl<D: Device> Mapping<D> {
    /// Nothing is mapped yet.
    pub(crate) fn new(shared: Arc<Shared<D>>, of: Of, region: D::Region) -> Self {
        Self { shared, of, region, residency: Mutex::default(), changed: Condvar::new() }
    }

    /// Puts physical memory under the region.
    pub(crate) fn map(&self, generation: u64, extents: Vec<(u64, Extent)>) -> Result<(), MapError> {
        let mut residency = self.residency();
        residency.map(generation)?;
        let device = &self.shared.device;
        let chunks = extents.into_iter().map(|(at, extent)| Ok((at, device.create(extent)?)));
        let mapped =
            chunks.collect::<Result<_, DeviceError>>().and_then(|chunks| device.map(&self.region, chunks));
        if let Err(error) = mapped {
            residency.map_failed();
            return Err(error.into());
        }
        Ok(())
    }

    /// Takes the memory away, now or when its last user is done; who waits for it is woken.
    pub(crate) fn unmap(&self, generation: u64) {
        let mut residency = self.residency();
        let unmapping = residency.unmap(generation);
        self.carry_out(residency, unmapping);
    }

    /// The program goes: as [`Self::unmap`], of whatever is mapped.
    pub(crate) fn retire(&self) {
        let mut residency = self.residency();
        let unmapping = residency.retire();
        self.carry_out(residency, unmapping);
    }

    fn carry_out(&self, residency: MutexGuard<'_, Residency>, unmapping: Unmapping) {
        self.changed.notify_all();
        match unmapping {
            Unmapping::Now(generation) => self.release(residency, generation),
            Unmapping::Already(generation) => {
                drop(residency);
                self.say_unmapped(generation);
            }
            Unmapping::Later | Unmapping::Ignored => {}
        }
    }

    /// Takes the memory away. Under the lock: whoever finds nothing mapped says so, or maps anew, and it has to
    /// be away by then.
    fn release(&self, residency: MutexGuard<'_, Residency>, generation: u64) {
        // The residency saw no user, and the device sees the same ones.
        let unmapped = self.shared.device.unmap(&self.region);
        drop(residency);
        match unmapped {
            Ok(()) => match &self.of {
                Of::Program(_) => self.say_unmapped(generation),
                Of::Object(object, fate) => fate.went(*object, |event| self.shared.events.send(event)),
            },
            Err(error) => self.shared.events.device_failed(&format!("memory cannot be unmapped: {error}")),
        }
    }

    fn say_unmapped(&self, generation: u64) {
        match &self.of {
            &Of::Program(program) => {
                self.shared.events.send(Event::Unmapped(Unmapped { program, generation }));
            }
            Of::Object(object, fate) => fate.tell(*object, |event| self.shared.events.send(event)),
        }
    }

    /// The device is gone: whoever waits is told.
    pub(crate) fn lose(&self, message: &str) {
        self.residency().lose(message);
        self.changed.notify_all();
    }

    /// Uses the mapping for a launch that reads these bytes, if they are loaded.
    pub(crate) fn use_loaded(
        self: &Arc<Self>,
        generation: u64,
        reads: &[Range<u64>],
    ) -> Result<Option<Use<D>>, Refusal> {
        let mut residency = self.residency();
        self.check_that(&residency, generation)?;
        Ok(self.missing(reads).is_none().then(|| self.enter(&mut residency)))
    }

    /// Uses the mapping for a launch that reads these bytes, once they are loaded.
    pub(crate) fn wait_loaded(
        self: &Arc<Self>,
        generation: u64,
        reads: &[Range<u64>],
    ) -> Result<Use<D>, Refusal> {
        let mut residency = self.residency();
        loop {
            self.check_that(&residency, generation)?;
            if self.missing(reads).is_none() {
                return Ok(self.enter(&mut residency));
            }
            reads.iter().try_for_each(|read| residency.may_come(read.clone()))?;
            residency = self.changed.wait(residency).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Uses the mapping, whatever of it is loaded.
    pub(crate) fn use_mapped(self: &Arc<Self>, generation: u64) -> Result<Use<D>, Refusal> {
        let mut residency = self.residency();
        self.check_that(&residency, generation)?;
        Ok(self.enter(&mut residency))
    }

    /// Whether steps of this generation may go on.
    pub(crate) fn check(&self, generation: u64) -> Result<(), Refusal> {
        self.check_that(&self.residency(), generation)
    }

    fn check_that(&self, residency: &Residency, generation: u64) -> Result<(), Refusal> {
        residency.check(generation).map_err(|refusal| match (&self.of, refusal) {
            (&Of::Object(object, _), Refusal::NotMapped(_)) => Refusal::Freed(object),
            (_, refusal) => refusal,
        })
    }

    /// A copy of these bytes was accepted.
    pub(crate) fn expect_copy(&self, ranges: &[Range<u64>]) {
        let mut residency = self.residency();
        ranges.iter().for_each(|range| residency.expect(range.clone()));
    }

    /// The first of these bytes that are not loaded.
    pub(crate) fn missing(&self, reads: &[Range<u64>]) -> Option<Range<u64>> {
        reads.iter().find_map(|read| self.shared.device.missing(&self.region, read.clone()))
    }

    fn enter(self: &Arc<Self>, residency: &mut Residency) -> Use<D> {
        residency.enter();
        Use { mapping: Arc::clone(self) }
    }

    fn residency(&self) -> MutexGuard<'_, Residency> {
        // No code of others runs under the lock: it is whole whoever panicked.
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A launch or copy that uses a mapping, which stays until this is dropped.
#[derive(Debug)]
pub(crate) struct Use<D: Device> {
    mapping: Arc<Mapping<D>>,
}

impl<D: Device> Use<D> {
    pub(crate) fn region(&self) -> &D::Region {
        &self.mapping.region
    }

    /// More bytes are loaded: wakes the launches that wait.
    pub(crate) fn loaded_more(&self) {
        // Under the lock, so that no launch can look before the bytes came and wait after this.
        let _residency = self.mapping.residency();
        self.mapping.changed.notify_all();
    }

    /// These bytes will not come: wakes the launches that wait for them.
    pub(crate) fn failed(&self, ranges: &[Range<u64>]) {
        let mut residency = self.mapping.residency();
        ranges.iter().for_each(|range| residency.fail(range.clone()));
        self.mapping.changed.notify_all();
    }
}

impl<D: Device> Drop for Use<D> {
    fn drop(&mut self) {
        let mut residency = self.mapping.residency();
        if let Some(generation) = residency.leave() {
            self.mapping.release(residency, generation);
        }
    }
}
