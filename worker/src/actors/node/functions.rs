//! The node's functions as dispatch sees them: installation and removal, batching limits, objectives,
//! profiles and SLO counts.

use std::sync::Arc;

use millrace_core::ids::FunctionIndex;
use millrace_scheduling::dispatch::ModelProfile;
use millrace_scheduling::{batching, dispatch, tenancy};
use millrace_types::{Digest, ModelId, SloCounts, Timestamp};
use millrace_workflow::hints::Prewarm;

use super::actor::NodeActor;
use crate::install::{FunctionConfig, InstallError, PreparedModel, Profile};
use crate::messages::work::RequestWork;
use crate::registry::Removed;
use crate::slo_scores::SloScores;

impl NodeActor {
    pub(super) fn install(
        &mut self,
        now: Timestamp,
        function: FunctionConfig,
        prepared: Arc<PreparedModel>,
    ) -> Result<(), InstallError> {
        let key = function.key.clone();
        let profiles = function.profiles.clone();
        if let Some((model, memory)) = self.functions.install(function, &prepared)? {
            let weights = prepared.weights_bytes;
            self.dispatch(now, dispatch::Event::Install { model, memory, weights });
            for profile in profiles {
                if let Some(learned) = self.state.learned(model, &profile) {
                    self.dispatch(now, dispatch::Event::ProfileLoaded(learned));
                }
            }
        }
        if let Some(model) = self.state.model_of(&key) {
            self.residency(now, model);
        }
        if let Some(limits) = self.state.limits_of(&key) {
            self.dispatch(now, limits);
        }
        if self.state.slices().contains_key(&key)
            && let Some(event) = self.state.slices_of(&key)
        {
            self.dispatch(now, event);
        }
        if let Some((function, tenant)) = self.state.capped(&key) {
            self.dispatch(now, tenancy::Event::Owner { function, tenant: Some(tenant) });
        }
        if self.dispatch.core.dispatch().uses_scores()
            && let Some((function, objective)) = self.state.objective_of(&key)
        {
            self.dispatch(now, dispatch::Event::Objective { function, objective });
        }
        Ok(())
    }

    /// Returns the profiles of the models on this node, for the profile store.
    pub(super) fn learned(&self) -> Vec<(Digest, Profile)> {
        let types = self.state.gpu_types();
        let learned = self.dispatch.core.dispatch().learned();
        let told = learned.filter_map(|ModelProfile { model, kind, load, swap, run }| {
            let gpu_type = types.get(kind as usize)?.clone();
            Some((self.state.digest_of(model)?, Profile { gpu_type, load, swap, run }))
        });
        told.collect()
    }

    /// Tells dispatch how many copies of a model stay warm, if the functions that use the model changed
    /// that.
    fn residency(&mut self, now: Timestamp, model: ModelId) {
        if let Some(residency) = self.state.new_residency(model) {
            self.dispatch(now, dispatch::Event::WarmCopiesRequired { model, copies: residency.min_warm });
        }
    }

    pub(super) fn scored(&mut self, now: Timestamp, function: FunctionIndex, here: SloCounts) {
        let base = self.remote_slo_counts.get(&function).copied().unwrap_or_default();
        self.dispatch(now, dispatch::Event::SloCountsChanged { function, counts: base.plus(here) });
    }

    /// Updates the functions' SLO counts of other nodes and earlier registrations, from the cluster's
    /// totals. The counts of this node are added on top.
    pub(super) fn scores(&mut self, now: Timestamp, scores: &SloScores) {
        if !self.dispatch.core.dispatch().uses_scores() {
            return;
        }
        for (function, key, here) in self.state.scored() {
            let Some(all) = scores.get(&key) else { continue };
            let known = self.remote_slo_counts.get(&function).copied().unwrap_or_default();
            let seen = all.since(here);
            // The totals lag behind this node's counts, so the difference is too small or exact, never too
            // large. The largest difference seen is the nearest to the truth.
            let base = SloCounts { m: known.m.max(seen.m), n: known.n.max(seen.n) };
            if base != known {
                self.remote_slo_counts.insert(function, base);
                self.scored(now, function, here);
            }
        }
    }

    /// Tells dispatch which models a request's workflow is likely to need next, as far as this node serves
    /// them (D29).
    pub(super) fn next(&mut self, now: Timestamp, work: &RequestWork) {
        if self.state.prewarm() == Prewarm::Off {
            return;
        }
        for key in &work.invocation.next {
            if let Some(model) = self.state.model_of(key) {
                self.dispatch(now, dispatch::Event::PrewarmHint { model, after: Some(work.model) });
            }
        }
    }

    pub(super) fn retired(&mut self, now: Timestamp, function: FunctionIndex) {
        self.remote_slo_counts.remove(&function);
        if self.dispatch.core.batches(function) {
            self.dispatch(now, batching::Event::Limits { function, batching: None, deadline: None });
        }
        if self.dispatch.core.dispatch().uses_scores() {
            self.dispatch(now, dispatch::Event::FunctionRemoved { function });
        }
        if self.dispatch.core.tenancy().has_capped_owner(function) {
            self.dispatch(now, tenancy::Event::Owner { function, tenant: None });
        }
        if let Some(model) = self.state.sliced_model(function) {
            self.dispatch(now, dispatch::Event::SlicesChanged { function, model, slices: None });
        }
        match self.state.remove(function) {
            Some(Removed::WithModel(model)) => self.dispatch(now, dispatch::Event::Remove { model }),
            Some(Removed::FunctionOnly(model)) => self.residency(now, model),
            None => {}
        }
    }

    pub(super) fn function_reset(&mut self, now: Timestamp, function: FunctionIndex) {
        let lost = self.entries.values().filter(|entry| entry.work.function == function);
        for key in lost.map(|entry| entry.work.key).collect::<Vec<_>>() {
            self.withdraw(now, key);
        }
    }
}
