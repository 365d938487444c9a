//! Another policy while the node works.

use millrace_policy::dispatch::{self, Objective};
use millrace_policy::gpu::Event as GpuEvent;
use millrace_policy::ids::FunctionIndex;
use millrace_types::{SloCounts, Timestamp};

use super::Node;
use crate::policy::Wanted;

impl Node {
    pub(super) fn set_policy(&mut self, now: Timestamp, wanted: &Wanted) {
        let (before, after) = self.supervisor.set_policy(wanted);
        if before.eviction != after.eviction {
            // First: dispatch says next how what is resident stands.
            for gpu in self.supervisor.gpu_indices() {
                self.tell_gpu(gpu, GpuEvent::Eviction(after.eviction));
            }
        }
        if (before.dispatch, before.eviction) != (after.dispatch, after.eviction) {
            let (policy, eviction) = (after.dispatch, after.eviction);
            let functions = if policy.scores() { self.standings() } else { Vec::new() };
            self.dispatch(now, dispatch::Event::Change { policy, eviction, functions });
        }
        if before.batching != after.batching {
            for limits in self.supervisor.all_limits() {
                self.dispatch(now, limits);
            }
            // Whether their requests run together is said with them.
            if after.dispatch.scores() {
                for (function, objective, _) in self.supervisor.objectives() {
                    self.dispatch(now, dispatch::Event::Objective { function, objective });
                }
            }
        }
        tracing::info!(
            generation = after.generation,
            dispatch = %after.dispatch,
            eviction = %after.eviction,
            batching = %after.batching,
            "the policy was set"
        );
    }

    /// What every function is held to, and what it scored here, elsewhere and before.
    fn standings(&self) -> Vec<(FunctionIndex, Option<Objective>, SloCounts)> {
        let mut standings = self.supervisor.objectives();
        for (function, _, counts) in &mut standings {
            let base = self.bases.get(function).copied().unwrap_or_default();
            *counts = base.plus(*counts);
        }
        standings
    }
}
