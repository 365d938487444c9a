//! Folds the events and actions of cores into one number each, so that two drivers of the same
//! scenario can be compared: equal numbers mean equal runs.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Timestamp};

use crate::decision_text::DecisionDigest;
use crate::fnv::Fnv;
use crate::ids::FunctionIndex;
use crate::machine::Core;

/// Identity of a core within a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CoreId {
    Admission(FunctionIndex),
    /// The node's dispatch queue.
    Dispatch,
    /// The node's fabric of links.
    Fabric,
    Gpu(GpuIndex),
    /// A GPU's executor process.
    Executor(GpuIndex),
    Link(LinkId),
}

impl CoreId {
    /// Returns the GPU that the core belongs to.
    fn gpu(self) -> Option<GpuIndex> {
        match self {
            Self::Gpu(gpu) | Self::Executor(gpu) => Some(gpu),
            Self::Admission(_) | Self::Dispatch | Self::Fabric | Self::Link(_) => None,
        }
    }
}

/// Digest of the events and actions of one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreDigest {
    /// The hash of every (core, time, event, actions) in order.
    pub hash: u64,
    /// Number of events folded in.
    pub events: u64,
}

/// Digests of a node's cores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CoreTrace {
    folds: BTreeMap<CoreId, CoreDigest>,
    decisions: DecisionDigest,
}

impl CoreTrace {
    /// Lets `core` handle an event and folds in its actions. `actions` must be empty.
    pub fn step<C: Core>(
        &mut self,
        id: CoreId,
        core: &mut C,
        now: Timestamp,
        event: C::Event,
        actions: &mut Vec<C::Action>,
    ) {
        let fold = self.folds.entry(id).or_insert(CoreDigest { hash: Fnv::OFFSET, events: 0 });
        let mut hasher = Fnv(fold.hash);
        (id, now, &event).hash(&mut hasher);
        core.on_event(now, event, actions);
        actions.hash(&mut hasher);
        core.next_wake().hash(&mut hasher);
        *fold = CoreDigest { hash: hasher.finish(), events: fold.events + 1 };
        for decision in actions.iter().filter_map(C::decision) {
            self.decisions.take(now, id.gpu(), decision);
        }
    }

    /// Returns the digest of all decisions.
    #[must_use]
    pub fn decisions(&self) -> &DecisionDigest {
        &self.decisions
    }

    /// Returns the digest of every core.
    #[must_use]
    pub fn folds(&self) -> &BTreeMap<CoreId, CoreDigest> {
        &self.folds
    }

    /// Returns one number for all cores.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hasher = Fnv(Fnv::OFFSET);
        for (id, fold) in &self.folds {
            (id, fold.hash, fold.events).hash(&mut hasher);
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    impl Core for Echo {
        type Event = u32;
        type Action = u32;
        fn on_event(&mut self, _: Timestamp, event: u32, actions: &mut Vec<u32>) {
            actions.push(event * 2);
        }
    }

    fn digest(events: &[(u64, u32)]) -> u64 {
        let mut trace = CoreTrace::default();
        for &(at, event) in events {
            trace.step(CoreId::Dispatch, &mut Echo, Timestamp(at), event, &mut Vec::new());
        }
        trace.digest()
    }

    #[test]
    fn equal_runs_have_equal_digests_and_other_runs_differ() {
        assert_eq!(digest(&[(1, 7), (2, 8)]), digest(&[(1, 7), (2, 8)]));
        for other in [&[(1, 7), (3, 8)][..], &[(1, 8), (2, 7)], &[(1, 7)], &[(2, 8), (1, 7)]] {
            assert_ne!(digest(&[(1, 7), (2, 8)]), digest(other), "{other:?}");
        }
    }

    #[test]
    fn the_trace_digest_does_not_change_between_builds() {
        assert_eq!(digest(&[(1, 7), (2, 8)]), 4_642_758_995_554_097_409);
    }
}
