//! The copy threads, one for each direction. A copy thread carries out grants, one batch after
//! another, each within its window. Between batches, the thread towards the GPU fills objects, and
//! the thread towards the host makes copies that need no grant. Neither thread waits for the other's
//! windows (D11).
//!
//! Work that is due precedes work that is not. Batches that cross the same links have successive
//! windows, so the batches of a transfer keep their order. No batch waits for a link that the batch does not
//! cross.

use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use millrace_device::{
    Device, Error as DeviceError, Event as _, HostRegion, StartDecision, StartWindow, Stream as _,
    monotonic_now,
};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{Copy, CopyDone, CopyFailed, CopyFailure};
use millrace_types::Timestamp;

use crate::conversions;
use crate::events::clip;
use crate::host_copies::{CopyToHost, ImmediateHostCopy};
use crate::mapping::{MappingUse, OBJECT_GENERATION, RegionMapping};
use crate::objects::{GpuObject, ObjectFill};
use crate::peers;
use crate::process::ExecutorState;
use crate::program::LoadedProgram;
use crate::queue::WorkQueue;
use crate::residency::StepRefusal;

/// Most copies that wait in each direction, in addition to the running copy. The fabric keeps one
/// batch running and one queued for each link. In addition, the outputs that a run keeps are placed
/// and copied out piece by piece, for each of its requests. More copies indicate a fault of the
/// worker.
pub const COPIES_QUEUED_MAX: usize = 1024;

/// A piece of work of a copy thread.
#[derive(Debug)]
pub(crate) enum CopyWork<D: Device> {
    /// The thread copies a batch under a grant.
    Batch(CopyBatch<D>),
    /// The thread fills an object from an output.
    Filling(ObjectFill<D>),
    /// The thread copies to the host without a grant.
    Out(ImmediateHostCopy<D>),
}

impl<D: Device> CopyWork<D> {
    /// Whether this work is the given batch.
    pub(crate) fn is_batch(&self, transfer: u64, batch: u64) -> bool {
        matches!(self, Self::Batch(job) if (job.transfer, job.batch) == (transfer, batch))
    }

    fn wait(&self) -> Duration {
        match self {
            Self::Batch(job) => job.wait(),
            Self::Filling(_) | Self::Out(_) => Duration::ZERO,
        }
    }
}

/// A batch of a transfer.
#[derive(Debug)]
pub(crate) struct CopyBatch<D: Device> {
    transfer: u64,
    batch: u64,
    ranges: Vec<Range<u64>>,
    window: StartWindow,
    /// Most bytes that are copied before waiting launches are woken.
    group: u64,
    way: CopyDirection<D>,
}

/// Direction of a batch, with the two ends.
#[derive(Debug)]
enum CopyDirection<D: Device> {
    ToGpu { mapping: Arc<RegionMapping<D>>, generation: u64, from: GpuSource<D> },
    ToHost(Arc<CopyToHost<D>>),
}

/// Target of a batch on the GPU.
#[derive(Debug)]
pub(crate) enum GpuTarget<'a, D: Device> {
    Program(&'a LoadedProgram<D>),
    Object(&'a GpuObject<D>),
}

/// Source of bytes for the GPU.
#[derive(Debug)]
enum GpuSource<D: Device> {
    Host(Arc<HostRegion>),
    /// Unsealed host memory, to which other processes may still write.
    File(OwnedFd),
    Peer(peers::PeerCopySource<D>),
}

/// Reason why a batch was not copied.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error(transparent)]
    Refused(#[from] StepRefusal),
    #[error("the window closed {0:?} before the copy could start")]
    Expired(Duration),
    #[error(transparent)]
    Device(#[from] DeviceError),
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

impl<D: Device> CopyBatch<D> {
    /// Creates a batch for a loaded program or a placed object.
    pub(crate) fn to_gpu(
        copy: Copy,
        to: GpuTarget<'_, D>,
        peer: Option<peers::PeerCopySource<D>>,
        device: &D,
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
            (None, GpuTarget::Program(program)) => GpuSource::Host(Arc::clone(&program.host)),
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
    pub(crate) fn to_host(copy: Copy, bytes: &Arc<CopyToHost<D>>, device: &D) -> Result<Self, GrantError> {
        let window = window(&copy);
        let Copy { transfer, batch, ranges, .. } = copy;
        let ranges = conversions::ranges(ranges)?;
        let group = device.capabilities().copy_max.get();
        within(&ranges, bytes.len())?;
        Ok(Self { transfer, batch, ranges, window, group, way: CopyDirection::ToHost(Arc::clone(bytes)) })
    }

    /// Returns the time until the batch may start; zero if the batch must be refused now.
    fn wait(&self) -> Duration {
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

/// Carries out the work of a queue until the queue is closed.
pub(crate) fn serve<D: Device>(
    shared: &ExecutorState<D>,
    queue: &WorkQueue<CopyWork<D>>,
    mut stream: D::Stream,
) {
    while let Some(work) = queue.pop_when(CopyWork::wait) {
        match work {
            CopyWork::Batch(job) => shared.events.send(batch(shared, job, &mut stream)),
            CopyWork::Filling(filling) => filling.carry_out(shared, &mut stream),
            CopyWork::Out(copy) => shared.events.send(copy.carry_out(shared, &mut stream)),
        }
    }
}

fn batch<D: Device>(shared: &ExecutorState<D>, job: CopyBatch<D>, stream: &mut D::Stream) -> Event {
    let transfer = job.transfer;
    let batch = job.batch;
    match carry_out(&job, stream) {
        Ok(done) => Event::CopyDone(done),
        Err(failed) => {
            if let CopyError::Device(DeviceError::Lost(message)) = &failed {
                shared.events.device_failed(message);
            }
            refused(transfer, batch, failure(&failed), failed)
        }
    }
}

/// Returns the event for a batch that was not copied.
pub(crate) fn refused(transfer: u64, batch: u64, failure: CopyFailure, message: impl ToString) -> Event {
    Event::CopyFailed(CopyFailed { transfer, batch, failure: failure.into(), message: clip(message) })
}

fn failure(failed: &CopyError) -> CopyFailure {
    match failed {
        CopyError::Refused(refusal) => conversions::copy_refused(refusal),
        CopyError::Expired(_) => CopyFailure::Expired,
        CopyError::Device(DeviceError::NotMapped(_)) => CopyFailure::NotMapped,
        CopyError::Device(DeviceError::PeerLost(_)) => CopyFailure::Peer,
        CopyError::Device(_) => CopyFailure::Device,
    }
}

fn carry_out<D: Device>(job: &CopyBatch<D>, stream: &mut D::Stream) -> Result<CopyDone, CopyError> {
    let (started, finished) = match &job.way {
        CopyDirection::ToGpu { mapping, generation, from } => {
            let using = mapping.use_mapped(*generation)?;
            let started = job.begin()?;
            (started, copy_to_gpu(job, stream, mapping, *generation, &using, from)?.unwrap_or(started))
        }
        CopyDirection::ToHost(bytes) => {
            let started = job.begin()?;
            let mut pieces = job.ranges.iter().flat_map(|range| pieces(range.clone(), job.group));
            (started, pieces.try_fold(started, |_, piece| bytes.copy(stream, piece))?)
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
fn copy_to_gpu<D: Device>(
    job: &CopyBatch<D>,
    stream: &mut D::Stream,
    mapping: &RegionMapping<D>,
    generation: u64,
    using: &MappingUse<D>,
    from: &GpuSource<D>,
) -> Result<Option<Timestamp>, CopyError> {
    let mut finished = None;
    for (index, range) in job.ranges.iter().enumerate() {
        for piece in pieces(range.clone(), job.group) {
            mapping.check(generation)?;
            match copy(from, stream, piece.clone(), using) {
                Ok(at) => finished = Some(at),
                // Launches that wait for these bytes continue to wait, because the worker grants the
                // bytes again from the host.
                Err(error) if matches!(from, GpuSource::Peer(_)) => return Err(error.into()),
                Err(error) => {
                    let mut lost = job.ranges[index..].to_vec();
                    lost[0].start = piece.start;
                    using.failed(&lost);
                    return Err(error.into());
                }
            }
        }
    }
    Ok(finished)
}

fn copy<D: Device>(
    from: &GpuSource<D>,
    stream: &mut D::Stream,
    piece: Range<u64>,
    mapping: &MappingUse<D>,
) -> Result<Timestamp, DeviceError> {
    match from {
        GpuSource::Host(host) => stream.copy(mapping.region(), host, piece)?,
        GpuSource::File(file) => stream.copy_from_file(mapping.region(), file.as_fd(), piece)?,
        GpuSource::Peer(peer) => peer.copy(stream, mapping.region(), piece)?,
    }
    let at = stream.record()?.wait()?;
    mapping.loaded_more();
    Ok(at)
}

/// Cuts a range into pieces of at most `max` bytes.
pub(crate) fn pieces(range: Range<u64>, max: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = (range.start..range.end).step_by(max as usize);
    starts.map(move |start| start..range.end.min(start + max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_in_order() {
        let cut = |range| pieces(range, 10).collect::<Vec<_>>();
        assert_eq!(cut(3..25), [3..13, 13..23, 23..25]);
        assert_eq!(cut(3..13), std::slice::from_ref(&(3..13)));
        assert_eq!(cut(3..3), []);
    }
}
