//! The copy threads, one for each direction. A copy thread carries out grants, one batch after
//! another, each within its window. Between batches, the thread towards the GPU fills objects, and
//! the thread towards the host makes copies that need no grant. Neither thread waits for the other's
//! windows (D11).
//!
//! Work that is due precedes work that is not. Batches that cross the same links have successive
//! windows, so the batches of a transfer keep their order. No batch waits for a link that the batch does not
//! cross.

use std::time::Duration;

use millrace_engine::{Engine, Stream};

use crate::copies::copy_batch::CopyBatch;
use crate::copies::host_copies::ImmediateHostCopy;
use crate::memory::executor_state::ExecutorState;
use crate::memory::objects::ObjectFill;
use crate::queue::WorkQueue;

/// Most copies that wait in each direction, in addition to the running copy. The fabric keeps one
/// batch running and one queued for each link. In addition, the outputs that a run keeps are placed
/// and copied out piece by piece, for each of its requests. More copies indicate a fault of the
/// worker.
pub const COPIES_QUEUED_MAX: usize = 1024;

/// A piece of work of a copy thread.
#[derive(Debug)]
pub(crate) enum CopyWork<E: Engine> {
    /// The thread copies a batch under a grant.
    Batch(CopyBatch<E>),
    /// The thread fills an object from an output.
    Filling(ObjectFill<E>),
    /// The thread copies to the host without a grant.
    Out(ImmediateHostCopy<E>),
}

impl<E: Engine> CopyWork<E> {
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

/// Carries out the work of a queue until the queue is closed.
pub(crate) fn serve<E: Engine>(
    shared: &ExecutorState<E>,
    queue: &WorkQueue<CopyWork<E>>,
    mut stream: Stream<E>,
) {
    while let Some(work) = queue.pop_when(CopyWork::wait) {
        match work {
            CopyWork::Batch(job) => shared.events.send(job.carry_out(shared, &mut stream)),
            CopyWork::Filling(filling) => filling.carry_out(shared, &mut stream),
            CopyWork::Out(copy) => shared.events.send(copy.carry_out(shared, &mut stream)),
        }
    }
}
