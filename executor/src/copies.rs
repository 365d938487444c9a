//! The copy thread: carries out grants, one batch after another, each within its window, and in
//! between moves within the GPU and copies out of it.

use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use millrace_device::{
    Device, Error as DeviceError, Event as _, HostRegion, Start, Stream as _, Window, monotonic_now,
};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{Copy, CopyDone, CopyFailed, CopyFailure};
use millrace_types::Timestamp;

use crate::copy_out::CopyOut;
use crate::events::clip;
use crate::mapping::{Mapping, OBJECT_GENERATION, Use};
use crate::objects::{Filling, Object};
use crate::peers;
use crate::process::Shared;
use crate::program::Program;
use crate::queue::Queue;
use crate::relocations::Relocation;
use crate::residency::Refusal;
use crate::wire;

/// What waits behind the batch being copied. The fabric keeps one batch running and one queued for
/// each link, and moves come only while there is none; but what a run keeps is placed and copied out
/// piece by piece, for each of its requests. More is the worker's mistake.
pub const COPIES_QUEUED_MAX: usize = 1024;

/// What the copy thread does in one turn.
#[derive(Debug)]
pub(crate) enum Work<D: Device> {
    /// Carries out a grant.
    Batch(Job<D>),
    /// Moves a program.
    Relocation(Relocation<D>),
    /// Fills an object.
    Filling(Filling<D>),
    /// Copies to the host.
    Out(CopyOut<D>),
}

impl<D: Device> Work<D> {
    /// Whether it is this batch.
    pub(crate) fn is_batch(&self, transfer: u64, batch: u64) -> bool {
        matches!(self, Self::Batch(job) if (job.transfer, job.batch) == (transfer, batch))
    }

    fn wait(&self) -> Duration {
        match self {
            Self::Batch(job) => job.wait(),
            Self::Relocation(_) | Self::Filling(_) | Self::Out(_) => Duration::ZERO,
        }
    }
}

/// One batch.
#[derive(Debug)]
pub(crate) struct Job<D: Device> {
    transfer: u64,
    batch: u64,
    mapping: Arc<Mapping<D>>,
    generation: u64,
    ranges: Vec<Range<u64>>,
    window: Window,
    from: From<D>,
    /// The most that is copied before launches which wait are woken.
    group: u64,
}

/// What a batch is copied to.
#[derive(Debug)]
pub(crate) enum To<'a, D: Device> {
    Program(&'a Program<D>),
    Object(&'a Object<D>),
}

/// Where its bytes come from.
#[derive(Debug)]
enum From<D: Device> {
    Host(Arc<HostRegion>),
    /// Host memory that others may write to still.
    File(OwnedFd),
    Peer(peers::Source<D>),
}

/// Why a batch was not copied.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the window closed {0:?} before the copy could start")]
    Expired(Duration),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A grant that makes no sense.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrantError {
    #[error(transparent)]
    Message(#[from] wire::Error),
    #[error("object {0} has no host memory: name a peer to copy from")]
    NoHost(u64),
    #[error("the object's host memory: {0}")]
    Host(std::io::Error),
    #[error("bytes {range:?} are past the end of the object, which has {size}")]
    Range { range: Range<u64>, size: u64 },
}

impl<D: Device> Job<D> {
    /// Takes a grant for a program that is loaded or an object that was placed.
    pub(crate) fn new(
        copy: Copy,
        to: To<'_, D>,
        peer: Option<peers::Source<D>>,
        device: &D,
    ) -> Result<Self, GrantError> {
        let ranges = wire::ranges(copy.ranges)?;
        let window =
            Window { not_before: Timestamp(copy.not_before_ns), not_after: Timestamp(copy.not_after_ns) };
        let Copy { transfer, batch, object, .. } = copy;
        let (mapping, generation, group) = match to {
            To::Program(program) => (&program.mapping, copy.generation, program.group),
            To::Object(object) => {
                if let Some(range) = ranges.iter().find(|range| range.end > object.bytes) {
                    return Err(GrantError::Range { range: range.clone(), size: object.bytes });
                }
                (&object.mapping, OBJECT_GENERATION, device.capabilities().copy_max.get())
            }
        };
        let from = match (peer, to) {
            (Some(peer), _) => From::Peer(peer),
            (None, To::Program(program)) => From::Host(Arc::clone(&program.host)),
            (None, To::Object(Object { host, .. })) => {
                let host = host.as_ref().ok_or(GrantError::NoHost(object))?;
                From::File(host.try_clone().map_err(GrantError::Host)?)
            }
        };
        mapping.expect_copy(&ranges);
        Ok(Self { transfer, batch, mapping: Arc::clone(mapping), generation, ranges, window, from, group })
    }

    /// How long until it may start, or is to be refused.
    fn wait(&self) -> Duration {
        match (self.mapping.check(self.generation), self.window.at(monotonic_now())) {
            (Ok(()), Start::In(wait)) => wait,
            _ => Duration::ZERO,
        }
    }
}

/// Copies until the queue is closed.
pub(crate) fn serve<D: Device>(shared: &Shared<D>, queue: &Queue<Work<D>>, mut stream: D::Stream) {
    while let Some(work) = queue.pop_when(Work::wait) {
        match work {
            Work::Batch(job) => shared.events.send(batch(shared, job, &mut stream)),
            Work::Relocation(relocation) => shared.events.send(relocation.carry_out(shared)),
            Work::Filling(filling) => filling.carry_out(shared, &mut stream),
            Work::Out(copy) => shared.events.send(copy.carry_out(shared, &mut stream)),
        }
    }
}

fn batch<D: Device>(shared: &Shared<D>, job: Job<D>, stream: &mut D::Stream) -> Event {
    let (transfer, batch) = (job.transfer, job.batch);
    match carry_out(job, stream) {
        Ok(done) => Event::CopyDone(done),
        Err(failed) => {
            if let Failed::Device(DeviceError::Lost(message)) = &failed {
                shared.events.device_failed(message);
            }
            refused(transfer, batch, failure(&failed), failed)
        }
    }
}

/// The event for a batch that was not copied.
pub(crate) fn refused(transfer: u64, batch: u64, failure: CopyFailure, message: impl ToString) -> Event {
    Event::CopyFailed(CopyFailed { transfer, batch, failure: failure.into(), message: clip(message) })
}

fn failure(failed: &Failed) -> CopyFailure {
    match failed {
        Failed::Refused(refusal) => wire::copy_refused(refusal),
        Failed::Expired(_) => CopyFailure::Expired,
        Failed::Device(DeviceError::NotMapped(_)) => CopyFailure::NotMapped,
        Failed::Device(DeviceError::PeerLost(_)) => CopyFailure::Peer,
        Failed::Device(_) => CopyFailure::Device,
    }
}

fn carry_out<D: Device>(job: Job<D>, stream: &mut D::Stream) -> Result<CopyDone, Failed> {
    let mapping = job.mapping.use_mapped(job.generation)?;
    if let Start::Expired(late) = job.window.at(monotonic_now()) {
        // Runs that wait for these bytes go on waiting: the worker grants them again, or unmaps.
        return Err(Failed::Expired(late));
    }
    let started = monotonic_now();
    let mut finished = started;
    let mut bytes = 0;
    for (index, range) in job.ranges.iter().enumerate() {
        for piece in pieces(range.clone(), job.group) {
            job.mapping.check(job.generation)?;
            match copy(&job, stream, piece.clone(), &mapping) {
                Ok(at) => finished = at,
                // Whoever waits for these bytes goes on waiting: they are granted again from the host.
                Err(error) if matches!(job.from, From::Peer(_)) => return Err(error.into()),
                Err(error) => {
                    let mut lost = job.ranges[index..].to_vec();
                    lost[0].start = piece.start;
                    mapping.failed(&lost);
                    return Err(error.into());
                }
            }
            bytes += piece.end - piece.start;
        }
    }
    Ok(CopyDone {
        transfer: job.transfer,
        batch: job.batch,
        started_ns: started.as_nanos(),
        finished_ns: finished.as_nanos(),
        bytes,
    })
}

fn copy<D: Device>(
    job: &Job<D>,
    stream: &mut D::Stream,
    piece: Range<u64>,
    mapping: &Use<D>,
) -> Result<Timestamp, DeviceError> {
    match &job.from {
        From::Host(host) => stream.copy(mapping.region(), host, piece)?,
        From::File(file) => stream.copy_from_file(mapping.region(), file.as_fd(), piece)?,
        From::Peer(peer) => peer.copy(stream, mapping.region(), piece)?,
    }
    let at = stream.record()?.wait()?;
    mapping.loaded_more();
    Ok(at)
}

/// Cuts a range into pieces of at most `max` bytes.
fn pieces(range: Range<u64>, max: u64) -> impl Iterator<Item = Range<u64>> {
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
