//! The models in the inference protocol's form, with the workers that are ready for each. The first use
//! of a function creates the entry. The entry is created again after a change of the function, of a
//! worker's readiness, or of the placements of a function that keeps state. So a resolved model never
//! lags behind the state, and a request finds its candidates without a look at every worker.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use millrace_cluster_state::{FUNCTIONS_MAX, FunctionRecord, RevisionRecord, State};
use millrace_gateway::backend::{Kind, ModelAvailability, ModelRevision};
use millrace_nodes::router::RouteRequest;
use millrace_types::workflow::Signature;
use millrace_types::{Digest, Failure, FunctionKey, Reason, Revision, RevisionKey, SequenceSpec, TenantName};

use crate::fleet::readiness::{self, RevisionReadiness};
use crate::fleet::{AttachedWorker, WorkerFleet, Workers};
use crate::leadership::{LeaderStatus, Shortages};

/// The models of one function.
#[derive(Debug)]
struct Entry {
    /// The record from which the models were made. A changed function has another allocation.
    function: Arc<FunctionRecord>,
    fleet_version: u64,
    /// The versions of the placements, which determine the serving worker; only for a function that
    /// keeps state.
    placed: Option<Vec<u64>>,
    /// The revisions that clients may name, oldest first.
    served: Vec<Served>,
}

/// A revision that clients may name.
#[derive(Debug)]
struct Served {
    model: Arc<ModelRevision>,
    candidates: Candidates,
}

/// The workers that are ready for a revision.
#[derive(Debug, Clone)]
pub(super) struct Candidates {
    pub(super) digest: Digest,
    /// Sizes of the model.
    pub(super) request: RouteRequest,
    /// The ready workers, ordered by name.
    pub(super) workers: Arc<[Arc<AttachedWorker>]>,
}

/// The inputs from which models are made.
#[derive(Debug)]
pub(super) struct CatalogInputs<'a> {
    pub(super) state: &'a State,
    pub(super) fleet: &'a WorkerFleet,
    pub(super) outlook: &'a LeaderStatus,
}

/// The models created so far. Every request reads the map and only changes write, so a read-write lock
/// guards the map.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    entries: RwLock<HashMap<FunctionKey, Arc<Entry>>>,
}

impl Catalog {
    /// Returns one model: the requested revision; or else the newest ready revision; or else the
    /// newest.
    pub(super) fn resolve(
        &self,
        sight: &CatalogInputs<'_>,
        key: &FunctionKey,
        revision: Option<Revision>,
    ) -> Result<Arc<ModelRevision>, Failure> {
        let function = sight.state.function(key).ok_or_else(|| not_found(key))?;
        let entry = self.entry(sight, function);
        let found = match revision {
            Some(number) => entry.revision(number),
            None => entry.default(),
        };
        found.map(|served| served.model.clone()).ok_or_else(|| revision_not_found(&entry, revision))
    }

    /// Returns the workers that are ready for a revision; `None` if clients may no longer name it.
    pub(super) fn candidates(&self, sight: &CatalogInputs<'_>, key: &RevisionKey) -> Option<Candidates> {
        let entry = self.entry(sight, sight.state.function(&key.function)?);
        Some(entry.revision(key.revision)?.candidates.clone())
    }

    /// Returns every model of a tenant, ordered by name and revision.
    pub(super) fn index(&self, sight: &CatalogInputs<'_>, tenant: &TenantName) -> Vec<Arc<ModelRevision>> {
        let entries = sight.state.functions_of(tenant).map(|function| self.entry(sight, function));
        let models = |entry: Arc<Entry>| entry.served.iter().map(|it| it.model.clone()).collect::<Vec<_>>();
        entries.flat_map(models).collect()
    }

    fn entry(&self, sight: &CatalogInputs<'_>, function: &Arc<FunctionRecord>) -> Arc<Entry> {
        let CatalogInputs { state, fleet, outlook } = *sight;
        // Read the version before the workers, so that a change in between causes a new entry.
        let fleet_version = fleet.version();
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let current = entries.get(&function.key).filter(|entry| {
            // An unready entry is made again at each request, because the reason also depends on
            // placements.
            Arc::ptr_eq(&entry.function, function)
                && entry.fleet_version == fleet_version
                && entry.placed.as_ref().is_none_or(|placed| *placed == versions(state, &function.key))
                && entry.default().is_some_and(Served::is_settled)
        });
        if let Some(entry) = current {
            return entry.clone();
        }
        drop(entries);
        let keeps_state = function.served().iter().any(|revision| revision.spec.sequences.is_some());
        let entry = Arc::new(Entry {
            function: function.clone(),
            fleet_version,
            placed: keeps_state.then(|| versions(state, &function.key)),
            served: served(state, function, &fleet.workers(), &outlook.shortages()),
        });
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= FUNCTIONS_MAX {
            // The catalog is full of deleted functions.
            entries.retain(|key, _| state.function(key).is_some());
        }
        entries.insert(function.key.clone(), entry.clone());
        entry
    }
}

impl Entry {
    fn revision(&self, number: Revision) -> Option<&Served> {
        self.served.iter().find(|served| served.model.revision == number)
    }

    fn default(&self) -> Option<&Served> {
        let ready = |served: &&Served| served.model.availability == ModelAvailability::Ready;
        self.served.iter().rev().find(ready).or(self.served.last())
    }
}

impl Served {
    /// Whether the model depends only on the function's record and the workers' reports.
    fn is_settled(&self) -> bool {
        matches!(self.model.availability, ModelAvailability::Ready | ModelAvailability::Disabled)
    }
}

/// Returns the versions of a function's placements.
fn versions(state: &State, key: &FunctionKey) -> Vec<u64> {
    state.placements_of(key).map(|placement| placement.resource_version).collect()
}

fn served(state: &State, function: &FunctionRecord, workers: &Workers, shortages: &Shortages) -> Vec<Served> {
    let served = function.served();
    let revisions: Vec<Revision> = served.iter().map(|revision| revision.number).collect();
    let one = |revision: &RevisionRecord| {
        // The artifact exists, because the state lets functions refer only to recorded artifacts.
        let artifact = state.artifact(&revision.digest)?;
        let readiness = readiness::of_revision(state, function, revision, workers, shortages);
        let ports = artifact.model.ports();
        let shown = |sequences: &SequenceSpec| sequences.shown(ports);
        let Signature { inputs, outputs } =
            revision.spec.sequences.as_ref().map_or_else(|| artifact.model.signature(), shown);
        let model = ModelRevision {
            key: function.key.clone(),
            revision: revision.number,
            revisions: revisions.clone(),
            kind: Kind::Function(revision.spec.runtime),
            inputs,
            outputs,
            timeout: revision.spec.timeout,
            objective: None,
            // The router must not repeat a request of a function that keeps state: only the worker
            // knows whether the request took effect.
            idempotent: revision.spec.idempotent && revision.spec.sequences.is_none(),
            sequences: revision.spec.sequences.clone(),
            weights: artifact.model.weights,
            availability: availability(readiness),
        };
        let memory = revision.gpu_memory(&artifact.model);
        let request = RouteRequest { weights: artifact.model.weights, memory };
        let ready = readiness::serving(state, function, revision, workers);
        let workers = ready.into_iter().cloned().collect();
        let candidates = Candidates { digest: revision.digest, request, workers };
        Some(Served { model: Arc::new(model), candidates })
    };
    served.iter().filter_map(|revision| one(revision)).collect()
}

pub(super) fn availability(readiness: RevisionReadiness) -> ModelAvailability {
    match readiness {
        RevisionReadiness::Prepared(_) => ModelAvailability::Ready,
        RevisionReadiness::Preparing => ModelAvailability::Preparing,
        RevisionReadiness::Disabled => ModelAvailability::Disabled,
        RevisionReadiness::Away(_) => ModelAvailability::Away(readiness.message()),
        RevisionReadiness::PrepareFailed(_)
        | RevisionReadiness::Unplaced(_)
        | RevisionReadiness::NoWorker => ModelAvailability::Unavailable(readiness.message()),
    }
}

pub(super) fn not_found(key: &FunctionKey) -> Failure {
    Failure::new(
        Reason::FunctionNotFound,
        format!("no function {:?} in tenant {}", key.name.as_str(), key.tenant),
    )
}

fn revision_not_found(entry: &Entry, revision: Option<Revision>) -> Failure {
    let served: Vec<String> = entry.served.iter().map(|it| it.model.revision.to_string()).collect();
    let asked = revision.map_or_else(|| "any".to_owned(), |revision| revision.to_string());
    let message = format!(
        "function {} does not serve version {asked}: name one of the served versions ({})",
        entry.function.key,
        served.join(", ")
    );
    Failure::new(Reason::RevisionNotFound, message)
}
