//! The models as the protocol shows them. Each function's are made when first asked for and made
//! again after the function changed or a worker's readiness did, so that what is resolved is never
//! behind the state.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use millrace_cluster_state::{FUNCTIONS_MAX, Function, RevisionRecord, State};
use millrace_gateway::backend::{Availability, Model};
use millrace_types::{Failure, FunctionKey, Reason, Revision, TenantName};

use crate::fleet::readiness::{self, Readiness};
use crate::fleet::{Fleet, Workers};

/// One function's models.
#[derive(Debug)]
struct Entry {
    /// The record they were made from: another record is another pointer.
    function: Arc<Function>,
    fleet_version: u64,
    /// Those that can be named, oldest first.
    models: Vec<Arc<Model>>,
}

/// The models made so far. Read on every request and written after changes only, hence the lock.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    entries: RwLock<HashMap<FunctionKey, Arc<Entry>>>,
}

impl Catalog {
    /// One model: the revision asked for, or else the newest that is ready, or else the newest.
    pub(super) fn resolve(
        &self,
        state: &State,
        fleet: &Fleet,
        key: &FunctionKey,
        revision: Option<Revision>,
    ) -> Result<Arc<Model>, Failure> {
        let function = state.function(key).ok_or_else(|| not_found(key))?;
        let entry = self.entry(state, fleet, function);
        let found = match revision {
            Some(number) => entry.models.iter().find(|model| model.revision == number),
            None => entry.default(),
        };
        found.cloned().ok_or_else(|| revision_not_found(&entry, revision))
    }

    /// Every model of a tenant, by name and revision.
    pub(super) fn index(&self, state: &State, fleet: &Fleet, tenant: &TenantName) -> Vec<Arc<Model>> {
        let functions = state.functions_of(tenant);
        functions.flat_map(|function| self.entry(state, fleet, function).models.clone()).collect()
    }

    fn entry(&self, state: &State, fleet: &Fleet, function: &Arc<Function>) -> Arc<Entry> {
        // Before the workers are read, so that a change in between makes the entry again.
        let fleet_version = fleet.version();
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let current = entries
            .get(&function.key)
            .filter(|entry| Arc::ptr_eq(&entry.function, function) && entry.fleet_version == fleet_version);
        if let Some(entry) = current {
            return entry.clone();
        }
        drop(entries);
        let entry = Arc::new(Entry {
            function: function.clone(),
            fleet_version,
            models: models(state, function, &fleet.workers()),
        });
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= FUNCTIONS_MAX {
            // Full of functions that were deleted.
            entries.retain(|key, _| state.function(key).is_some());
        }
        entries.insert(function.key.clone(), entry.clone());
        entry
    }
}

impl Entry {
    fn default(&self) -> Option<&Arc<Model>> {
        let ready = self.models.iter().rev().find(|model| model.availability == Availability::Ready);
        ready.or(self.models.last())
    }
}

fn models(state: &State, function: &Function, workers: &Workers) -> Vec<Arc<Model>> {
    let served = function.served();
    let revisions: Vec<Revision> = served.iter().map(|revision| revision.number).collect();
    let model = |revision: &RevisionRecord| {
        // Known: a function refers only to artifacts that are.
        let artifact = state.artifact(&revision.digest)?;
        Some(Arc::new(Model {
            key: function.key.clone(),
            revision: revision.number,
            revisions: revisions.clone(),
            runtime: revision.spec.runtime,
            inputs: artifact.model.inputs.clone(),
            outputs: artifact.model.outputs.clone(),
            timeout: revision.spec.timeout,
            idempotent: revision.spec.idempotent,
            weights: artifact.model.weights,
            availability: availability(readiness::of_revision(function, revision, workers)),
        }))
    };
    served.iter().filter_map(|revision| model(revision)).collect()
}

fn availability(readiness: Readiness) -> Availability {
    match readiness {
        Readiness::Prepared(_) => Availability::Ready,
        Readiness::Preparing => Availability::Preparing,
        Readiness::Disabled => Availability::Disabled,
        Readiness::PrepareFailed(_) | Readiness::NoWorker => Availability::Unavailable(readiness.message()),
    }
}

pub(super) fn not_found(key: &FunctionKey) -> Failure {
    Failure::new(
        Reason::FunctionNotFound,
        format!("no function {:?} in tenant {}", key.name.as_str(), key.tenant),
    )
}

fn revision_not_found(entry: &Entry, revision: Option<Revision>) -> Failure {
    let served: Vec<String> = entry.models.iter().map(|model| model.revision.to_string()).collect();
    let asked = revision.map_or_else(|| "any".to_owned(), |revision| revision.to_string());
    let message = format!(
        "function {} has no version {asked} to serve: it serves {}",
        entry.function.key,
        served.join(", ")
    );
    Failure::new(Reason::RevisionNotFound, message)
}
