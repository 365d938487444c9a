//! One link's books: what is out on it, what it carried and how fast. The core of a Link actor. It
//! issues the grants that the fabric gave for the paths that begin with this link, and reports
//! their ends back.

use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use super::{BatchFailure, Grant};
use crate::core::Core;
use crate::ids::{BatchId, TransferId};
use crate::paths::{Direction, Each};

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The fabric granted a batch.
    Grant(Grant),
    /// The fabric wants one back.
    Revoke {
        /// Whose executor was to copy it.
        gpu: GpuIndex,
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
    },
    /// An executor copied one.
    Done {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
        /// When it began.
        started: Timestamp,
        /// When it ended.
        finished: Timestamp,
    },
    /// An executor did not.
    Failed {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
        /// Why.
        why: BatchFailure,
    },
    /// Bytes crossed under a grant that another link issued.
    Carried(Direction, Bytes),
    /// A GPU lost everything: nothing more is heard of its batches.
    Down(GpuIndex),
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the executor copy.
    Copy(Grant),
    /// Have the executor forget a copy that has not begun.
    Revoke {
        /// Which executor.
        gpu: GpuIndex,
        /// Of which transfer.
        transfer: TransferId,
        /// Which batch.
        batch: BatchId,
    },
    /// Tell the fabric that a batch crossed.
    Done {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
    },
    /// Tell the fabric that one did not.
    Failed {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
        /// Why.
        why: BatchFailure,
    },
}

/// A link: of the host's in both directions, of NVLinks towards either GPU.
#[derive(Debug, Default)]
pub struct Link {
    out: Vec<Grant>,
    traffic: Each<Traffic>,
}

/// What crossed a link in one direction.
#[derive(Debug, Default)]
struct Traffic {
    carried: Bytes,
    /// Nanoseconds that a mebibyte took, smoothed over the last batches.
    pace: Option<u64>,
}

impl Traffic {
    fn measure(&mut self, size: Bytes, took: Duration) {
        self.carried += size;
        let nanos = took.as_nanos() * u128::from(Bytes::mib(1).0) / u128::from(size.0.max(1));
        let new = u64::try_from(nanos).unwrap_or(u64::MAX);
        // A quarter of the new, three of the old.
        self.pace = Some(self.pace.map_or(new, |old| old - old / 4 + new / 4));
    }
}

impl Link {
    /// Batches issued and not ended, in both directions.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.out.len()
    }

    /// Bytes that crossed.
    #[must_use]
    pub fn carried(&self, direction: Direction) -> Bytes {
        self.traffic[direction].carried
    }

    /// The rate of the last batches that this link issued.
    #[must_use]
    pub fn measured(&self, direction: Direction) -> Option<BytesPerSec> {
        let nanos = self.traffic[direction].pace?.max(1);
        Some(BytesPerSec(Bytes::mib(1).0.saturating_mul(1_000_000_000) / nanos))
    }

    fn take(&mut self, transfer: TransferId, batch: BatchId) -> Option<Grant> {
        let place = self.out.iter().position(|out| out.transfer == transfer && out.batch == batch)?;
        Some(self.out.remove(place))
    }
}

impl Core for Link {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, _: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Grant(grant) => {
                self.out.push(grant.clone());
                actions.push(Action::Copy(grant));
            }
            Event::Revoke { gpu, transfer, batch } => actions.push(Action::Revoke { gpu, transfer, batch }),
            Event::Done { transfer, batch, started, finished } => {
                if let Some(grant) = self.take(transfer, batch) {
                    let size = grant.cargo.span(&grant.chunks).1;
                    self.traffic[grant.cargo.direction()].measure(size, finished.since(started));
                    actions.push(Action::Done { transfer, batch });
                }
            }
            Event::Failed { transfer, batch, why } => {
                if self.take(transfer, batch).is_some() {
                    actions.push(Action::Failed { transfer, batch, why });
                }
            }
            Event::Carried(direction, size) => self.traffic[direction].carried += size,
            Event::Down(gpu) => self.out.retain(|grant| grant.gpu != gpu),
        }
    }
}
