//! The core of a Link actor: the batches that are in flight on a link, the bytes that crossed, and
//! the measured rate. The link issues the fabric's grants for paths that begin with the link, and
//! reports the end of each batch to the fabric.

use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use super::protocol::{BatchFailure, BatchGrant};
use crate::paths::{HostDirection, PerDirection};
use millrace_core::Core;
use millrace_core::ids::{BatchId, TransferId};

/// An event that a link handles.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The fabric granted a batch.
    Grant(BatchGrant),
    /// The fabric revokes a batch.
    Revoke {
        /// The GPU whose executor was to copy the batch.
        gpu: GpuIndex,
        transfer: TransferId,
        batch: BatchId,
    },
    /// An executor copied a batch.
    Done {
        transfer: TransferId,
        batch: BatchId,
        /// Start of the copy.
        started: Timestamp,
        /// End of the copy.
        finished: Timestamp,
    },
    /// An executor did not copy a batch.
    Failed { transfer: TransferId, batch: BatchId, why: BatchFailure },
    /// Bytes crossed under a grant that another link issued.
    Carried(HostDirection, Bytes),
    /// A GPU lost all memory: no report of batches for this GPU will follow.
    Down(GpuIndex),
}

/// An action that a link asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the executor copy a batch.
    Copy(BatchGrant),
    /// Have the executor drop a copy that has not begun.
    Revoke {
        /// The GPU whose executor was to copy the batch.
        gpu: GpuIndex,
        transfer: TransferId,
        batch: BatchId,
    },
    /// Tell the fabric that a batch crossed.
    Done { transfer: TransferId, batch: BatchId },
    /// Tell the fabric that a batch did not cross.
    Failed { transfer: TransferId, batch: BatchId, why: BatchFailure },
}

/// A link: both directions of a link to the host, or of an NVLink.
#[derive(Debug, Default)]
pub struct LinkLedger {
    out: Vec<BatchGrant>,
    traffic: PerDirection<LinkTraffic>,
}

/// The bytes that crossed a link in one direction, and their pace.
#[derive(Debug, Default)]
struct LinkTraffic {
    carried: Bytes,
    /// Nanoseconds per mebibyte, smoothed over the last batches.
    pace: Option<u64>,
}

impl LinkTraffic {
    fn measure(&mut self, size: Bytes, took: Duration) {
        self.carried += size;
        let nanos = took.as_nanos() * u128::from(Bytes::mib(1).0) / u128::from(size.0.max(1));
        let new = u64::try_from(nanos).unwrap_or(u64::MAX);
        // The new value counts for a quarter.
        self.pace = Some(self.pace.map_or(new, |old| old - old / 4 + new / 4));
    }
}

impl LinkLedger {
    /// Returns the number of batches that were issued and have not ended, in both directions.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.out.len()
    }

    /// Returns the bytes that crossed in a direction.
    #[must_use]
    pub fn carried(&self, direction: HostDirection) -> Bytes {
        self.traffic[direction].carried
    }

    /// Returns the smoothed rate of the batches that this link issued; `None` before the first
    /// batch.
    #[must_use]
    pub fn measured(&self, direction: HostDirection) -> Option<BytesPerSec> {
        let nanos = self.traffic[direction].pace?.max(1);
        Some(BytesPerSec(Bytes::mib(1).0.saturating_mul(1_000_000_000) / nanos))
    }

    fn take(&mut self, transfer: TransferId, batch: BatchId) -> Option<BatchGrant> {
        let place = self.out.iter().position(|out| out.transfer == transfer && out.batch == batch)?;
        Some(self.out.remove(place))
    }
}

impl Core for LinkLedger {
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
