//! The work on a node's GPUs, for the router of the controllers.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use super::cost::SwapSource;
use super::dispatcher::{Dispatcher, RequestLocation};

/// The expected GPU time of a node's requests. Runs of models that never ran count as nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeWork {
    /// Time until each GPU has finished the requests that were assigned to it, in index order.
    pub assigned: Vec<Duration>,
    /// GPU time of the waiting requests: their runs, and a load of each model that no GPU holds.
    pub waiting: Duration,
}

impl Dispatcher {
    /// Returns the work on this node.
    #[must_use]
    pub fn work(&self, now: Timestamp) -> NodeWork {
        let left = |seat| self.fleet.backlog(&self.models, now, seat).unwrap_or_default();
        let longest = |gpu| self.fleet.seats_of(gpu).map(|(seat, _)| left(seat)).max().unwrap_or_default();
        let assigned = self.fleet.all().map(longest).collect();
        let mut waiting = Duration::ZERO;
        let mut absent = BTreeSet::new();
        for (&key, place) in &self.places {
            let RequestLocation::Queued { request, .. } = place else { continue };
            waiting += self.models.longest_run(request.model, self.rows(key)).unwrap_or_default();
            if self.models.get(request.model).holders.is_empty() && absent.insert(request.model) {
                let gpu = self.fleet.get(GpuIndex(0));
                waiting += gpu.swap_time(&self.models, request.model, SwapSource::Host);
            }
        }
        NodeWork { assigned, waiting }
    }
}
