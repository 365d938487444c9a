//! Whether a function can serve, from the state and the reports of its workers. The admin API's
//! conditions and the inference protocol's readiness both use this rule.

use std::sync::Arc;

use millrace_cluster_state::{FunctionRecord, PlacementRecord, RevisionRecord, State, WorkflowRecord};
use millrace_types::{FunctionKey, FunctionName, NodeName, RevisionKey};

use super::worker::{AttachedWorker, RevisionPhase};
use super::worker_fleet::Workers;
use crate::leadership::Shortages;

/// The readiness of a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RevisionReadiness {
    /// The revision is ready on this many workers.
    Prepared(usize),
    /// At least one worker is preparing the revision.
    Preparing,
    /// Every worker with a placement failed to prepare the revision. The text is the first worker's
    /// error.
    PrepareFailed(String),
    /// The function is not placed, for the given reason.
    Unplaced(String),
    /// The nodes with a placement, given by name, are not attached to this controller.
    Away(String),
    /// No worker is attached.
    NoWorker,
    /// The function's owner unloaded it.
    Disabled,
}

/// Returns the workers that serve a revision: all workers that report that revision ready. A revision
/// that keeps state is served only by the worker with the state. Another worker may not have unloaded
/// the revision yet, or be reachable by this controller alone, and may have other sequences under the
/// same names.
pub(crate) fn serving<'a>(
    state: &State,
    function: &FunctionRecord,
    revision: &RevisionRecord,
    workers: &'a Workers,
) -> Vec<&'a Arc<AttachedWorker>> {
    let key = revision_key(&function.key, revision);
    let is_ready = |worker: &&Arc<AttachedWorker>| worker.is_ready(&key);
    if revision.spec.sequences.is_none() {
        return with_slices(state, function, revision, workers.values().filter(is_ready).collect());
    }
    // Select by placement first and by readiness second. In the other order, a client could reach an
    // older copy for a moment and find sequences in an outdated state.
    let has_state = state_at(state, function).and_then(|node| workers.get(node));
    has_state.filter(is_ready).into_iter().collect()
}

/// Returns the workers on which a revision's requests need not wait for a slice; all workers if there is
/// none. On a worker that shares its GPUs, a revision that asks for slices computes in its slices alone.
fn with_slices<'a>(
    state: &State,
    function: &FunctionRecord,
    revision: &RevisionRecord,
    ready: Vec<&'a Arc<AttachedWorker>>,
) -> Vec<&'a Arc<AttachedWorker>> {
    if revision.spec.slices.is_none() || revision.number != function.latest().number {
        return ready;
    }
    let has = |worker: &Arc<AttachedWorker>| {
        let placement = state.placements_of(&function.key).find(|it| it.node == worker.name);
        placement.is_some_and(|placement| !placement.slices.is_empty())
    };
    let serves = |worker: &&Arc<AttachedWorker>| worker.shares_gpus() != Some(true) || has(worker);
    let able: Vec<_> = ready.iter().copied().filter(serves).collect();
    if able.is_empty() { ready } else { able }
}

/// Returns the node with the sequences of a function that keeps state, now or in the version before. If
/// the newest version keeps state, the function has one copy, or two while the copy moves: the newer
/// placement has the state. Otherwise several copies may exist, and only the oldest copy has the
/// sequences.
fn state_at<'a>(state: &'a State, function: &'a FunctionRecord) -> Option<&'a NodeName> {
    let by_age = |placement: &&'a Arc<PlacementRecord>| placement.resource_version;
    let placements = state.placements_of(&function.key);
    let keeps_state = function.latest().spec.sequences.is_some();
    let at = if keeps_state { placements.max_by_key(by_age) } else { placements.min_by_key(by_age) };
    at.map(|placement| &placement.node)
}

/// Returns the readiness of a revision. Without a serving worker, the readiness follows from the
/// reports of the workers with a placement.
pub(crate) fn of_revision(
    state: &State,
    function: &FunctionRecord,
    revision: &RevisionRecord,
    workers: &Workers,
    shortages: &Shortages,
) -> RevisionReadiness {
    if !function.enabled {
        return RevisionReadiness::Disabled;
    }
    let key = revision_key(&function.key, revision);
    match serving(state, function, revision, workers).len() {
        0 if workers.is_empty() && state.placements_of(&key.function).next().is_none() => {
            RevisionReadiness::NoWorker
        }
        0 => on_its_way(state, &key, workers, shortages),
        ready => RevisionReadiness::Prepared(ready),
    }
}

/// Returns the first function in a workflow, including nested workflows, without a ready revision, and
/// the readiness of that function. `None` means that the workflow can be invoked.
pub(crate) fn of_workflow(
    state: &State,
    workflow: &WorkflowRecord,
    workers: &Workers,
    shortages: &Shortages,
) -> Option<(FunctionName, RevisionReadiness)> {
    for key in state.functions_in(&workflow.key.tenant, workflow.spec.runs()) {
        let Some(function) = state.function(&key) else { continue };
        // The revision before serves too, until a newer revision does.
        let of = |revision: &RevisionRecord| of_revision(state, function, revision, workers, shortages);
        let ready = |revision: &Arc<RevisionRecord>| matches!(of(revision), RevisionReadiness::Prepared(_));
        if !function.served().iter().any(ready) {
            return Some((key.name, of(function.latest())));
        }
    }
    None
}

/// Returns the readiness of a revision that is ready on no worker.
fn on_its_way(
    state: &State,
    key: &RevisionKey,
    workers: &Workers,
    shortages: &Shortages,
) -> RevisionReadiness {
    let nodes: Vec<_> = state.placements_of(&key.function).map(|placement| &placement.node).collect();
    if nodes.is_empty() {
        // A function without a placement and without a shortage is about to be placed.
        let short = shortages.get(&key.function);
        return short.map_or(RevisionReadiness::Preparing, |short| {
            RevisionReadiness::Unplaced(short.why.to_string())
        });
    }
    let mut failed = None;
    for worker in nodes.iter().filter_map(|node| workers.get(*node)) {
        match worker.phase(key) {
            Some(RevisionPhase::Failed(message)) => {
                failed.get_or_insert_with(|| format!("worker {}: {message}", worker.name));
            }
            Some(RevisionPhase::Ready | RevisionPhase::Preparing) | None => {
                return RevisionReadiness::Preparing;
            }
        }
    }
    match failed {
        Some(message) => RevisionReadiness::PrepareFailed(message),
        None => {
            RevisionReadiness::Away(nodes.iter().map(|node| node.as_str()).collect::<Vec<_>>().join(", "))
        }
    }
}

pub(crate) fn revision_key(function: &FunctionKey, revision: &RevisionRecord) -> RevisionKey {
    RevisionKey { function: function.clone(), revision: revision.number }
}

impl RevisionReadiness {
    /// Returns the condition's CamelCase reason.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Prepared(_) => "Prepared",
            Self::Preparing => "Preparing",
            Self::PrepareFailed(_) => "PrepareFailed",
            Self::Unplaced(_) => "Unplaced",
            Self::Away(_) | Self::NoWorker => "NoWorker",
            Self::Disabled => "Disabled",
        }
    }

    /// Returns the message for people.
    pub(crate) fn message(&self) -> String {
        match self {
            Self::Prepared(1) => "ready on 1 worker".to_owned(),
            Self::Prepared(workers) => format!("ready on {workers} workers"),
            Self::Preparing => "the workers are preparing the model".to_owned(),
            Self::PrepareFailed(message) => message.clone(),
            Self::Unplaced(why) => format!("the function is not placed: {why}"),
            Self::Away(nodes) => format!(
                "the function is placed on {nodes}, but no node of these is attached to this controller"
            ),
            Self::NoWorker => "no worker is attached: start one".to_owned(),
            Self::Disabled => "unloaded: load it to serve".to_owned(),
        }
    }
}
