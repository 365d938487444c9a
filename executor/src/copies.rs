//! The copy thread: carries out grants, one batch after another, each within its window, and moves
//! within the GPU in between.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use millrace_device::{Device, Error as DeviceError, Event as _, Start, Stream as _, Window, monotonic_now};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{Copy, CopyDone, CopyFailed, CopyFailure};
use millrace_types::Timestamp;

use crate::events::clip;
use crate::peers::Source;
use crate::process::Shared;
use crate::program::{Program, Use};
use crate::queue::Queue;
use crate::relocations::Relocation;
use crate::residency::Refusal;
use crate::wire;

/// Batches and moves that wait behind the one being copied. The fabric keeps one batch running and
/// one queued for each link, and moves come only while there is none, so more is the worker's mistake.
pub const COPIES_QUEUED_MAX: usize = 64;

/// What the copy thread does in one turn.
#[derive(Debug)]
pub(crate) enum Work<D: Device> {
    /// Carries out a grant.
    Batch(Job<D>),
    /// Moves a program.
    Relocation(Relocation<D>),
}

impl<D: Device> Work<D> {
    /// Whether it is this batch.
    pub(crate) fn is_batch(&self, transfer: u64, batch: u64) -> bool {
        matches!(self, Self::Batch(job) if (job.transfer, job.batch) == (transfer, batch))
    }

    fn wait(&self) -> Duration {
        match self {
            Self::Batch(job) => job.wait(),
            Self::Relocation(_) => Duration::ZERO,
        }
    }
}

/// One batch.
#[derive(Debug)]
pub(crate) struct Job<D: Device> {
    transfer: u64,
    batch: u64,
    program: Arc<Program<D>>,
    generation: u64,
    ranges: Vec<Range<u64>>,
    window: Window,
    /// Where they come from, where not from the host.
    peer: Option<Source<D>>,
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

impl<D: Device> Job<D> {
    /// Takes a grant for a program that is loaded.
    pub(crate) fn new(
        copy: Copy,
        program: Arc<Program<D>>,
        peer: Option<Source<D>>,
    ) -> Result<Self, wire::Error> {
        let ranges = wire::ranges(copy.ranges)?;
        let window =
            Window { not_before: Timestamp(copy.not_before_ns), not_after: Timestamp(copy.not_after_ns) };
        program.expect_copy(&ranges);
        let Copy { transfer, batch, generation, .. } = copy;
        Ok(Self { transfer, batch, program, generation, ranges, window, peer })
    }

    /// How long until it may start, or is to be refused.
    fn wait(&self) -> Duration {
        match (self.program.check(self.generation), self.window.at(monotonic_now())) {
            (Ok(()), Start::In(wait)) => wait,
            _ => Duration::ZERO,
        }
    }
}

/// Copies until the queue is closed.
pub(crate) fn serve<D: Device>(shared: &Shared<D>, queue: &Queue<Work<D>>, mut stream: D::Stream) {
    while let Some(work) = queue.pop_when(Work::wait) {
        let event = match work {
            Work::Batch(job) => batch(shared, job, &mut stream),
            Work::Relocation(relocation) => relocation.carry_out(shared),
        };
        shared.events.send(event);
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
    let mapping = job.program.use_mapped(job.generation)?;
    if let Start::Expired(late) = job.window.at(monotonic_now()) {
        // Runs that wait for these bytes go on waiting: the worker grants them again, or unmaps.
        return Err(Failed::Expired(late));
    }
    let started = monotonic_now();
    let mut finished = started;
    let mut bytes = 0;
    for (index, range) in job.ranges.iter().enumerate() {
        for piece in pieces(range.clone(), job.program.group) {
            job.program.check(job.generation)?;
            match copy(&job, stream, piece.clone(), &mapping) {
                Ok(at) => finished = at,
                // Whoever waits for these bytes goes on waiting: they are granted again from the host.
                Err(error) if job.peer.is_some() => return Err(error.into()),
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
    mapping: &Use<'_, D>,
) -> Result<Timestamp, DeviceError> {
    match &job.peer {
        None => stream.copy(&job.program.region, &job.program.host, piece)?,
        Some(peer) => peer.copy(stream, &job.program.region, piece)?,
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
