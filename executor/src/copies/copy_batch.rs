//! A batch of a transfer: bytes that are copied under a grant, within its window.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use millrace_device::probe::COPIES_AHEAD;
use millrace_device::{
    Device as _, Error as DeviceError, Event as _, HostRegion, StartDecision, StartWindow, Stream as _,
    monotonic_now,
};
use millrace_engine::{DeviceEvent, Engine, Error as EngineError, Stream};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{Copy, CopyDone, CopyFailed, CopyFailure};
use millrace_types::Timestamp;

use crate::copies::host_copies::CopyToHost;
use crate::copies::peers::PeerCopySource;
use crate::copies::pieces::pieces;
use crate::memory::executor_state::ExecutorState;
use crate::memory::mapping::{MappingUse, OBJECT_GENERATION, RegionMapping};
use crate::memory::mapping_state::StepRefusal;
use crate::memory::objects::GpuObject;
use crate::programs::loaded_program::LoadedProgram;
use crate::socket::conversions;
use crate::socket::events::clip;

/// A batch of a transfer.
#[derive(Debug)]
pub(crate) struct CopyBatch<E: Engine> {
    pub(super) transfer: u64,
    pub(super) batch: u64,
    ranges: Vec<Range<u64>>,
    window: StartWindow,
    /// Most bytes that are copied before waiting launches are woken.
    group: u64,
    way: CopyDirection<E>,
}

/// Direction of a batch, with the two ends.
#[derive(Debug)]
enum CopyDirection<E: Engine> {
    ToGpu { mapping: Arc<RegionMapping<E>>, generation: u64, from: GpuSource<E> },
    ToHost(Arc<CopyToHost<E>>),
}

/// Target of a batch on the GPU.
#[derive(Debug)]
pub(crate) enum GpuTarget<'a, E: Engine> {
    Program(&'a LoadedProgram<E>),
    Object(&'a GpuObject<E>),
}

/// Source of bytes for the GPU.
#[derive(Debug)]
enum GpuSource<E: Engine> {
    Host(HostRegion),
    /// Unsealed host memory, to which other processes may still write.
    File(OwnedFd),
    Peer(PeerCopySource<E>),
}

/// Reason why a batch was not copied.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error(transparent)]
    Refused(#[from] StepRefusal),
    #[error("the window closed {0:?} before the copy could start")]
    Expired(Duration),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Reason why a grant is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrantError {
    #[error(transparent)]
    Message(#[from] conversions::Error),
    #[error("object {0} has no host memory: name a peer to copy from")]
    NoHost(u64),
    #[error("the object's host memory: {0}")]
    Host(std::io::Error),
    #[error("bytes {range:?} are past the end of the object or output, which has {size} bytes")]
    Range { range: Range<u64>, size: u64 },
}

impl From<DeviceError> for CopyError {
    fn from(error: DeviceError) -> Self {
        Self::Engine(error.into())
    }
}

impl<E: Engine> CopyBatch<E> {
    /// Creates a batch for a loaded program or a placed object.
    pub(crate) fn to_gpu(
        copy: Copy,
        to: GpuTarget<'_, E>,
        peer: Option<PeerCopySource<E>>,
        device: &E::Device,
    ) -> Result<Self, GrantError> {
        let window = window(&copy);
        let Copy { transfer, batch, object, generation, ranges, .. } = copy;
        let ranges = conversions::ranges(ranges)?;
        let (mapping, generation, group) = match to {
            GpuTarget::Program(program) => (&program.mapping, generation, program.group),
            GpuTarget::Object(object) => {
                within(&ranges, object.bytes)?;
                (&object.mapping, OBJECT_GENERATION, device.capabilities().copy_max.get())
            }
        };
        let from = match (peer, to) {
            (Some(peer), _) => GpuSource::Peer(peer),
            (None, GpuTarget::Program(program)) => GpuSource::Host(program.host.clone()),
            (None, GpuTarget::Object(GpuObject { host, .. })) => {
                let host = host.as_ref().ok_or(GrantError::NoHost(object))?;
                GpuSource::File(host.try_clone().map_err(GrantError::Host)?)
            }
        };
        mapping.expect_copy(&ranges);
        let way = CopyDirection::ToGpu { mapping: Arc::clone(mapping), generation, from };
        Ok(Self { transfer, batch, ranges, window, group, way })
    }

    /// Creates a batch for a copy to the host.
    pub(crate) fn to_host(
        copy: Copy,
        bytes: &Arc<CopyToHost<E>>,
        device: &E::Device,
    ) -> Result<Self, GrantError> {
        let window = window(&copy);
        let Copy { transfer, batch, ranges, .. } = copy;
        let ranges = conversions::ranges(ranges)?;
        let group = device.capabilities().copy_max.get();
        within(&ranges, bytes.len())?;
        Ok(Self { transfer, batch, ranges, window, group, way: CopyDirection::ToHost(Arc::clone(bytes)) })
    }

    /// Returns the time until the batch may start; zero if the batch may start now, or must be refused.
    pub(super) fn wait(&self) -> Duration {
        let checked = match &self.way {
            CopyDirection::ToGpu { mapping, generation, .. } => mapping.check(*generation),
            // The source of a copy to the host lives as long as this batch.
            CopyDirection::ToHost(_) => Ok(()),
        };
        match (checked, self.window.at(monotonic_now())) {
            (Ok(()), StartDecision::In(wait)) => wait,
            _ => Duration::ZERO,
        }
    }

    /// Copies the batch, and returns the event for the outcome.
    pub(super) fn carry_out(self, shared: &ExecutorState<E>, stream: &mut Stream<E>) -> Event {
        match copy_ranges(&shared.engine, &self, stream) {
            Ok(done) => Event::CopyDone(done),
            Err(failed) => {
                if let CopyError::Engine(error) = &failed {
                    shared.events.report_loss(error);
                }
                refused(self.transfer, self.batch, failure(&failed), failed)
            }
        }
    }

    /// Begins the batch, unless its window has closed. Runs that wait for these bytes continue to
    /// wait: the worker grants the bytes again, or unmaps.
    fn begin(&self) -> Result<Timestamp, CopyError> {
        match self.window.at(monotonic_now()) {
            StartDecision::Expired(late) => Err(CopyError::Expired(late)),
            StartDecision::Now | StartDecision::In(_) => Ok(monotonic_now()),
        }
    }
}

fn window(copy: &Copy) -> StartWindow {
    StartWindow { not_before: Timestamp(copy.not_before_ns), not_after: Timestamp(copy.not_after_ns) }
}

/// Checks that all ranges are within `size` bytes.
fn within(ranges: &[Range<u64>], size: u64) -> Result<(), GrantError> {
    let past = ranges.iter().find(|range| range.end > size);
    past.map_or(Ok(()), |range| Err(GrantError::Range { range: range.clone(), size }))
}

/// Returns the event for a batch that was not copied.
pub(crate) fn refused(transfer: u64, batch: u64, failure: CopyFailure, message: impl ToString) -> Event {
    Event::CopyFailed(CopyFailed { transfer, batch, failure: failure.into(), message: clip(message) })
}

fn failure(failed: &CopyError) -> CopyFailure {
    match failed {
        CopyError::Refused(refusal) => copy_refused(refusal),
        CopyError::Expired(_) => CopyFailure::Expired,
        CopyError::Engine(EngineError::Device(DeviceError::NotMapped(_))) => CopyFailure::NotMapped,
        CopyError::Engine(EngineError::Device(DeviceError::PeerLost(_))) => CopyFailure::Peer,
        CopyError::Engine(_) => CopyFailure::Device,
    }
}

fn copy_ranges<E: Engine>(
    engine: &E,
    job: &CopyBatch<E>,
    stream: &mut Stream<E>,
) -> Result<CopyDone, CopyError> {
    let (started, finished) = match &job.way {
        CopyDirection::ToGpu { mapping, generation, from } => {
            let using = mapping.use_mapped(*generation)?;
            let started = job.begin()?;
            (started, copy_to_gpu(job, stream, mapping, *generation, &using, from)?.unwrap_or(started))
        }
        CopyDirection::ToHost(bytes) => {
            let started = job.begin()?;
            let mut pieces = job.ranges.iter().flat_map(|range| pieces(range.clone(), job.group));
            (started, pieces.try_fold(started, |_, piece| bytes.copy(engine, stream, piece))?)
        }
    };
    let bytes = |range: &Range<u64>| range.end.saturating_sub(range.start);
    Ok(CopyDone {
        transfer: job.transfer,
        batch: job.batch,
        started_ns: started.as_nanos(),
        finished_ns: finished.as_nanos(),
        bytes: job.ranges.iter().map(bytes).sum(),
    })
}

/// Copies a batch to the GPU. Returns the time at which the last bytes arrived.
fn copy_to_gpu<E: Engine>(
    job: &CopyBatch<E>,
    stream: &mut Stream<E>,
    mapping: &RegionMapping<E>,
    generation: u64,
    using: &MappingUse<E>,
    from: &GpuSource<E>,
) -> Result<Option<Timestamp>, CopyError> {
    let mut issued = IssuedPieces::<E>::default();
    let mut outcome = Ok(None);
    for (index, piece) in all_pieces(&job.ranges, job.group) {
        outcome = mapping.check(generation).map_err(CopyError::from).and_then(|()| {
            let oldest = issued.oldest_of(COPIES_AHEAD)?;
            issued.push(copy(from, stream, piece.clone(), using), index, piece)?;
            Ok(oldest)
        });
        if outcome.is_err() {
            break;
        }
    }
    // The mapping may be unmapped only after all issued copies have finished.
    let rest = issued.rest();
    let failed = issued.failed;
    let outcome = outcome.and_then(|at| Ok(rest?.or(at)));
    // Launches that wait for bytes of a peer continue to wait, because the worker grants the bytes
    // again from the host.
    if let Some((index, piece)) = failed.filter(|_| !matches!(from, GpuSource::Peer(_))) {
        let mut lost = job.ranges[index..].to_vec();
        lost[0].start = piece.start;
        using.failed(&lost);
    }
    outcome
}

/// Returns the pieces of the ranges, each with the index of its range.
fn all_pieces(ranges: &[Range<u64>], group: u64) -> impl Iterator<Item = (usize, Range<u64>)> {
    let pieces =
        move |(index, range): (usize, &Range<u64>)| pieces(range.clone(), group).map(move |it| (index, it));
    ranges.iter().enumerate().flat_map(pieces)
}

/// The pieces of a batch that were issued and not awaited, oldest first.
struct IssuedPieces<E: Engine> {
    events: VecDeque<(DeviceEvent<E>, usize, Range<u64>)>,
    /// The first piece that failed, with the index of its range.
    failed: Option<(usize, Range<u64>)>,
}

impl<E: Engine> Default for IssuedPieces<E> {
    fn default() -> Self {
        Self { events: VecDeque::new(), failed: None }
    }
}

impl<E: Engine> IssuedPieces<E> {
    fn push(
        &mut self,
        issued: Result<DeviceEvent<E>, DeviceError>,
        index: usize,
        piece: Range<u64>,
    ) -> Result<(), DeviceError> {
        match issued {
            Ok(event) => self.events.push_back((event, index, piece)),
            Err(error) => {
                self.fail(index, piece);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits for the oldest piece if this number of pieces is issued. Returns the time at which it
    /// arrived.
    fn oldest_of(&mut self, ahead: usize) -> Result<Option<Timestamp>, DeviceError> {
        if self.events.len() < ahead { Ok(None) } else { self.await_oldest() }
    }

    /// Waits for all pieces. Returns the time at which the last piece arrived, or the first error.
    fn rest(&mut self) -> Result<Option<Timestamp>, DeviceError> {
        let mut outcome = Ok(None);
        while !self.events.is_empty() {
            let arrived = self.await_oldest();
            outcome = outcome.and(arrived);
        }
        outcome
    }

    fn await_oldest(&mut self) -> Result<Option<Timestamp>, DeviceError> {
        let Some((event, index, piece)) = self.events.pop_front() else { return Ok(None) };
        event.wait().map(Some).inspect_err(|_| self.fail(index, piece))
    }

    /// Records the first failure. Earlier pieces fail first, except for a piece that could not be
    /// issued.
    fn fail(&mut self, index: usize, piece: Range<u64>) {
        let earlier =
            self.failed.as_ref().is_none_or(|(other, at)| (index, piece.start) < (*other, at.start));
        if earlier {
            self.failed = Some((index, piece));
        }
    }
}

/// Issues the copy of a piece, and wakes the launches that wait for its bytes.
fn copy<E: Engine>(
    from: &GpuSource<E>,
    stream: &mut Stream<E>,
    piece: Range<u64>,
    mapping: &MappingUse<E>,
) -> Result<DeviceEvent<E>, DeviceError> {
    match from {
        GpuSource::Host(host) => stream.copy(mapping.region(), host, piece)?,
        GpuSource::File(file) => stream.copy_from_file(mapping.region(), file.as_fd(), piece)?,
        GpuSource::Peer(peer) => peer.copy(stream, mapping.region(), piece)?,
    }
    let event = stream.record()?;
    mapping.issued_more();
    Ok(event)
}

/// Returns the failure kind of a copy for a refused step.
fn copy_refused(refusal: &StepRefusal) -> CopyFailure {
    match refusal {
        StepRefusal::Stale { .. } => CopyFailure::StaleGeneration,
        StepRefusal::NotMapped(_) | StepRefusal::StillMapped(_) | StepRefusal::Freed(_) => {
            CopyFailure::NotMapped
        }
        StepRefusal::CopyFailed(_) | StepRefusal::Lost(_) => CopyFailure::Device,
    }
}
