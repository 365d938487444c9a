//! The snapshots of the host tier: the states of functions, the models in host memory, the signatures of
//! functions, and the cumulative counts.

use std::sync::Arc;

use millrace_proto::worker as wire;
use tokio::sync::watch;

use crate::signature::Signatures;

/// Cumulative counts of the host tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostTierCounts {
    /// Loads of evicted models into host memory because requests waited for them.
    pub cold_starts: u64,
    /// Models that were evicted from host memory to make room for others.
    pub evictions: u64,
}

/// The receivers of the host tier's snapshots. A receiver is notified only when its value changes.
#[derive(Debug, Clone)]
pub struct HostTierSnapshot {
    /// The state of each function, in key order.
    pub statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    /// The models in host memory.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// The signatures of the functions that are ready.
    pub signatures: watch::Receiver<Arc<Signatures>>,
    /// The cumulative counts.
    pub counts: watch::Receiver<Arc<HostTierCounts>>,
}

/// The senders of the host tier's snapshots.
#[derive(Debug, Default)]
pub struct HostTierPublisher {
    pub(super) statuses: watch::Sender<Arc<Vec<wire::FunctionStatus>>>,
    pub(super) models: watch::Sender<Arc<Vec<wire::HostModel>>>,
    pub(super) signatures: watch::Sender<Arc<Signatures>>,
    pub(super) counts: watch::Sender<Arc<HostTierCounts>>,
}

impl HostTierPublisher {
    /// Returns the receivers.
    #[must_use]
    pub fn view(&self) -> HostTierSnapshot {
        HostTierSnapshot {
            statuses: self.statuses.subscribe(),
            models: self.models.subscribe(),
            signatures: self.signatures.subscribe(),
            counts: self.counts.subscribe(),
        }
    }
}
