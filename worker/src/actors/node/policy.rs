//! The change of the scheduling policy of a running node.

use millrace_core::ids::FunctionIndex;
use millrace_gpu::Event as GpuEvent;
use millrace_scheduling::dispatch::{self, LatencyObjective};
use millrace_transfers::fabric;
use millrace_types::{SloCounts, Timestamp};

use super::actor::NodeActor;
use crate::policy::DesiredPolicy;

impl NodeActor {
    pub(super) fn set_policy(&mut self, now: Timestamp, wanted: &DesiredPolicy) {
        let slices = self.state.slices();
        let (before, after) = self.state.set_policy(wanted);
        let generation = after.generation;
        let before = before.policy;
        let after = after.policy;
        if before.eviction != after.eviction {
            // The GPUs are told before dispatch, because dispatch next tells them the eviction ranks of resident
            // models under the new eviction.
            for gpu in self.state.gpu_indices() {
                self.tell_gpu(gpu, GpuEvent::Eviction(after.eviction));
            }
        }
        if (before.dispatch, before.eviction) != (after.dispatch, after.eviction) {
            let policy = after.dispatch;
            let functions = if policy.uses_scores() { self.counts_of_functions() } else { Vec::new() };
            self.dispatch(
                now,
                dispatch::Event::PolicyChanged { policy, eviction: after.eviction, functions },
            );
        }
        if before.gpu_sharing != after.gpu_sharing {
            let sharing = self.state.config.sharing_of(&after);
            for gpu in self.state.gpu_indices() {
                self.tell_gpu(gpu, GpuEvent::Sharing(sharing));
            }
            let seats = self.state.config.open_seats(&after);
            self.dispatch(now, dispatch::Event::SeatsOpened { seats });
            self.slices_changed(now, &slices);
        }
        if before.batching != after.batching {
            for limits in self.state.all_limits() {
                self.dispatch(now, limits);
            }
            // An objective also says whether the function's requests are batchable.
            if after.dispatch.uses_scores() {
                for (function, objective, _) in self.state.objectives() {
                    self.dispatch(now, dispatch::Event::Objective { function, objective });
                }
            }
        }
        if (before.sharing, before.host_links) != (after.sharing, after.host_links) {
            let change = fabric::Event::Change { sharing: after.sharing, host_links: after.host_links };
            self.fabric(now, change);
        }
        tracing::info!(
            generation,
            dispatch = %after.dispatch,
            eviction = %after.eviction,
            batching = %after.batching,
            sharing = %after.sharing,
            host_links = %after.host_links,
            gpu_sharing = %after.gpu_sharing,
            "the policy was set"
        );
    }

    /// Returns the objective of every function, and its SLO counts in the whole cluster, earlier
    /// registrations included.
    fn counts_of_functions(&self) -> Vec<(FunctionIndex, Option<LatencyObjective>, SloCounts)> {
        let mut functions = self.state.objectives();
        for (function, _, counts) in &mut functions {
            let base = self.remote_slo_counts.get(function).copied().unwrap_or_default();
            *counts = base.plus(*counts);
        }
        functions
    }
}
