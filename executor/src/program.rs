//! A loaded model: its region, its launches, and who may use its mapping when.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_device::{Access, Code, Device, Error as DeviceError, Extent, HostRegion, KernelSpec};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{LoadProgram, Unmapped};
use millrace_types::Bytes;

use crate::opaque::{self, Opaque};
use crate::plan::{self, Plan};
use crate::process::Shared;
use crate::residency::{Refusal, Residency, Unmapping};
use crate::wire::{self, Declared, Descriptors};

/// What a run on the control thread may take: about what waking another thread takes.
const QUICK_MAX: Duration = Duration::from_micros(50);

/// A program, shared by the control thread and whatever copies and runs name it.
#[derive(Debug)]
pub(crate) struct Program<D: Device> {
    shared: Arc<Shared<D>>,
    id: u64,
    pub(crate) name: String,
    /// Its launches, by number.
    pub(crate) plan: Plan,
    pub(crate) module: D::Module,
    pub(crate) whole: D::Kernel,
    pub(crate) kernels: Vec<D::Kernel>,
    pub(crate) inputs: Vec<Declared>,
    pub(crate) outputs: Vec<Declared>,
    pub(crate) region: D::Region,
    /// Runs with inline inputs of fewer bytes are quick; 0 before one was.
    pub(crate) quick_inputs: AtomicUsize,
    /// The authoritative copy of its weights (T10).
    pub(crate) host: HostRegion,
    /// The most that is copied before launches which wait are woken.
    pub(crate) group: u64,
    /// An opaque program's, whose launches declare no reads.
    pub(crate) opaque: Option<Opaque>,
    residency: Mutex<Residency>,
    /// Bytes were loaded, or the mapping changed.
    changed: Condvar,
}

/// Why a program could not be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error(transparent)]
    Message(#[from] wire::Error),
    #[error(transparent)]
    Launches(#[from] plan::Error),
    #[error(transparent)]
    Opaque(#[from] opaque::Error),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl<D: Device> Program<D> {
    /// Loads a model's graph against a region of its own.
    pub(crate) fn load(
        shared: Arc<Shared<D>>,
        message: LoadProgram,
        mut descriptors: Descriptors,
    ) -> Result<Self, LoadError> {
        let device = &shared.device;
        let graph = descriptors.take(message.graph_fd)?;
        let graph = device.import_host(graph, Bytes(message.graph_bytes), Access::Direct)?;
        let weights: OwnedFd = descriptors.take(message.weights_fd)?;
        let access = if message.weights_pageable { Access::Buffered } else { Access::Direct };
        let host = device.import_host(weights, Bytes(message.weights_bytes), access)?;
        let inputs = message.inputs.into_iter().map(wire::declared).collect::<Result<Vec<_>, _>>()?;
        let outputs = message.outputs.into_iter().map(wire::declared).collect::<Result<Vec<_>, _>>()?;
        let launches = message.launches.into_iter().map(wire::launch).collect::<Result<_, _>>()?;
        let names = |values: &[Declared]| values.iter().map(|value| value.name.clone()).collect::<Vec<_>>();
        let mut plan = Plan::new(&names(&inputs), &names(&outputs), launches)?;
        let opaque = Opaque::new(&mut plan, host.bytes(), message.opaque_block_bytes)?;

        let region = device.reserve(host.bytes())?;
        let code = Code {
            graph: graph.as_slice().to_vec(),
            weights_name: millrace_model::WEIGHTS_FILE,
            weights: &host,
        };
        let module = device.load(&region, code)?;
        let whole = device.kernel(&module, &plan.whole.spec)?;
        let kernels =
            plan.steps.iter().map(|step| device.kernel(&module, &step.spec)).collect::<Result<_, _>>()?;
        let (residency, changed) = (Mutex::default(), Condvar::new());
        let copy_max = device.capabilities().copy_max.get();
        let group = if message.group_bytes == 0 { copy_max } else { message.group_bytes.min(copy_max) };
        let (id, name) = (message.program, message.name);
        Ok(Self {
            shared,
            id,
            name,
            plan,
            module,
            whole,
            kernels,
            inputs,
            outputs,
            region,
            quick_inputs: AtomicUsize::new(0),
            host,
            group,
            opaque,
            residency,
            changed,
        })
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

    /// Puts other physical memory under the region, with what is in it. Where that fails, none is
    /// under it afterwards.
    pub(crate) fn relocate(
        &self,
        was: u64,
        generation: u64,
        extents: Vec<(u64, Extent)>,
    ) -> Result<(), MapError> {
        // In use meanwhile: an unmap that comes waits for its end.
        let mapping = self.use_mapped(was)?;
        let device = &self.shared.device;
        let chunks = extents.into_iter().map(|(at, extent)| Ok((at, device.create(extent)?)));
        let chunks = chunks.collect::<Result<_, DeviceError>>();
        let moved = chunks.and_then(|chunks| device.relocate(&self.region, chunks)).map_err(MapError::from);
        let moved = moved.and_then(|()| Ok(self.residency().renew(generation)?));
        if moved.is_err() {
            self.unmap(was);
        }
        drop(mapping);
        moved
    }

    /// Takes the memory away, now or when its last user is done; who waits for it is woken.
    pub(crate) fn unmap(&self, generation: u64) {
        let unmapping = self.residency().unmap(generation);
        self.carry_out(unmapping);
    }

    /// The program goes: as [`Self::unmap`], of whatever is mapped.
    pub(crate) fn retire(&self) {
        let unmapping = self.residency().retire();
        self.carry_out(unmapping);
    }

    fn carry_out(&self, unmapping: Unmapping) {
        self.changed.notify_all();
        match unmapping {
            Unmapping::Now(generation) => self.release(generation),
            Unmapping::Already(generation) => self.say_unmapped(generation),
            Unmapping::Later | Unmapping::Ignored => {}
        }
    }

    fn release(&self, generation: u64) {
        // The residency saw no user, and the device sees the same ones.
        match self.shared.device.unmap(&self.region) {
            Ok(()) => self.say_unmapped(generation),
            Err(error) => self.shared.events.device_failed(&format!("memory cannot be unmapped: {error}")),
        }
    }

    fn say_unmapped(&self, generation: u64) {
        self.shared.events.send(Event::Unmapped(Unmapped { program: self.id, generation }));
    }

    /// The device is gone: whoever waits is told.
    pub(crate) fn lose(&self, message: &str) {
        self.residency().lose(message);
        self.changed.notify_all();
    }

    /// One of its launches, with reads that were not known before.
    pub(crate) fn kernel(&self, spec: &KernelSpec) -> Result<D::Kernel, DeviceError> {
        self.shared.device.kernel(&self.module, spec)
    }

    /// Uses the mapping for a launch that reads these bytes, if they are loaded.
    pub(crate) fn use_loaded(
        &self,
        generation: u64,
        reads: &[Range<u64>],
    ) -> Result<Option<Use<'_, D>>, Refusal> {
        let mut residency = self.residency();
        residency.check(generation)?;
        Ok(self.loaded(reads).then(|| self.enter(&mut residency)))
    }

    /// Uses the mapping for a launch that reads these bytes, once they are loaded.
    pub(crate) fn wait_loaded(&self, generation: u64, reads: &[Range<u64>]) -> Result<Use<'_, D>, Refusal> {
        let mut residency = self.residency();
        loop {
            residency.check(generation)?;
            if self.loaded(reads) {
                return Ok(self.enter(&mut residency));
            }
            reads.iter().try_for_each(|read| residency.may_come(read.clone()))?;
            residency = self.changed.wait(residency).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Uses the mapping for a copy.
    pub(crate) fn use_mapped(&self, generation: u64) -> Result<Use<'_, D>, Refusal> {
        let mut residency = self.residency();
        residency.check(generation)?;
        Ok(self.enter(&mut residency))
    }

    /// Learns from a run. Quick ones raise the bound to their size, others lower it below theirs.
    pub(crate) fn took(&self, inline_bytes: Option<usize>, time: Duration) {
        match inline_bytes {
            Some(bytes) if time <= QUICK_MAX => {
                self.quick_inputs.fetch_max(bytes.saturating_add(1), Ordering::Relaxed);
            }
            Some(bytes) => {
                self.quick_inputs.fetch_min(bytes, Ordering::Relaxed);
            }
            None => {}
        }
    }

    /// Whether steps of this generation may go on.
    pub(crate) fn check(&self, generation: u64) -> Result<(), Refusal> {
        self.residency().check(generation)
    }

    /// A copy of these bytes was accepted.
    pub(crate) fn expect_copy(&self, ranges: &[Range<u64>]) {
        let mut residency = self.residency();
        ranges.iter().for_each(|range| residency.expect(range.clone()));
    }

    fn loaded(&self, reads: &[Range<u64>]) -> bool {
        reads.iter().all(|read| self.shared.device.missing(&self.region, read.clone()).is_none())
    }

    fn enter(&self, residency: &mut Residency) -> Use<'_, D> {
        residency.enter();
        Use { program: self }
    }

    fn residency(&self) -> MutexGuard<'_, Residency> {
        // No code of others runs under the lock: it is whole whoever panicked.
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why memory could not be put under a program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MapError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A launch or copy that uses a program's mapping. The mapping stays until this is dropped.
#[derive(Debug)]
pub(crate) struct Use<'a, D: Device> {
    program: &'a Program<D>,
}

impl<D: Device> Use<'_, D> {
    /// More bytes are loaded: wakes the launches that wait.
    pub(crate) fn loaded_more(&self) {
        // Under the lock, so that no launch can look before the bytes came and wait after this.
        let _residency = self.program.residency();
        self.program.changed.notify_all();
    }

    /// These bytes will not come: wakes the launches that wait for them.
    pub(crate) fn failed(&self, ranges: &[Range<u64>]) {
        let mut residency = self.program.residency();
        ranges.iter().for_each(|range| residency.fail(range.clone()));
        self.program.changed.notify_all();
    }
}

impl<D: Device> Drop for Use<'_, D> {
    fn drop(&mut self) {
        let left = self.program.residency().leave();
        if let Some(generation) = left {
            self.program.release(generation);
        }
    }
}
