//! Whether a function can serve, from the state and what its workers report. The one rule behind
//! the admin API's conditions and the protocol's readiness.

use std::sync::Arc;

use millrace_cluster_state::{Function, Placement, RevisionRecord, State, Workflow};
use millrace_types::{FunctionKey, FunctionName, NodeName, RevisionKey};

use super::{Phase, Worker, Workers};
use crate::leader::Shortages;

/// Whether one revision can be invoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Ready on this many workers.
    Prepared(usize),
    /// On its way to at least one.
    Preparing,
    /// Every worker it is placed on failed; what the first one said.
    PrepareFailed(String),
    /// It is placed nowhere; why.
    Unplaced(String),
    /// None of the workers it is placed on, by name, is attached to this controller.
    Away(String),
    /// No worker is attached.
    NoWorker,
    /// Its owner unloaded it.
    Disabled,
}

/// The workers that serve a revision: any that says so. Of one that keeps state only the one that has the
/// state: another may have yet to hear that it is to let go of it, or be lost to all but this controller,
/// and has other sequences under the same names.
pub(crate) fn serving<'a>(
    state: &State,
    function: &Function,
    revision: &RevisionRecord,
    workers: &'a Workers,
) -> Vec<&'a Arc<Worker>> {
    let key = revision_key(&function.key, revision);
    let is_ready = |worker: &&Arc<Worker>| worker.is_ready(&key);
    if revision.spec.sequences.is_none() {
        return workers.values().filter(is_ready).collect();
    }
    // Placed first, ready second: whoever asked another in between would find its sequences there again,
    // and not as they were left.
    let has_state = state_at(state, function).and_then(|node| workers.get(node));
    has_state.filter(is_ready).into_iter().collect()
}

/// Where the sequences are of a function that keeps state, or did in the version before. There is one copy
/// of it, and two only while it moves: then where it goes. Where the newest version keeps none there may be
/// several, and those that come later have none of the sequences: the copy that was there first, for as long
/// as it stays.
fn state_at<'a>(state: &'a State, function: &'a Function) -> Option<&'a NodeName> {
    let by_age = |placement: &&'a Arc<Placement>| placement.resource_version;
    let placements = state.placements_of(&function.key);
    let keeps_state = function.latest().spec.sequences.is_some();
    let at = if keeps_state { placements.max_by_key(by_age) } else { placements.min_by_key(by_age) };
    at.map(|placement| &placement.node)
}

/// How far a revision is. Who serves it counts, and of the others what they say where the function is
/// placed.
pub(crate) fn of_revision(
    state: &State,
    function: &Function,
    revision: &RevisionRecord,
    workers: &Workers,
    shortages: &Shortages,
) -> Readiness {
    if !function.enabled {
        return Readiness::Disabled;
    }
    let key = revision_key(&function.key, revision);
    match serving(state, function, revision, workers).len() {
        0 if workers.is_empty() && state.placements_of(&key.function).next().is_none() => Readiness::NoWorker,
        0 => on_its_way(state, &key, workers, shortages),
        ready => Readiness::Prepared(ready),
    }
}

/// What keeps a workflow from being invoked: the first function that it, or a workflow in it, runs
/// and of which no revision is ready. `None` where there is none.
pub(crate) fn of_workflow(
    state: &State,
    workflow: &Workflow,
    workers: &Workers,
    shortages: &Shortages,
) -> Option<(FunctionName, Readiness)> {
    for key in state.functions_in(&workflow.key.tenant, workflow.spec.runs()) {
        let Some(function) = state.function(&key) else { continue };
        // One that can be named serves, as long as a newer one does not.
        let of = |revision: &RevisionRecord| of_revision(state, function, revision, workers, shortages);
        let ready = |revision: &Arc<RevisionRecord>| matches!(of(revision), Readiness::Prepared(_));
        if !function.served().iter().any(ready) {
            return Some((key.name, of(function.latest())));
        }
    }
    None
}

/// How far a revision is that is ready nowhere.
fn on_its_way(state: &State, key: &RevisionKey, workers: &Workers, shortages: &Shortages) -> Readiness {
    let nodes: Vec<_> = state.placements_of(&key.function).map(|placement| &placement.node).collect();
    if nodes.is_empty() {
        // Without a reason it is about to be placed.
        let short = shortages.get(&key.function);
        return short.map_or(Readiness::Preparing, |short| Readiness::Unplaced(short.why.to_string()));
    }
    let mut failed = None;
    for worker in nodes.iter().filter_map(|node| workers.get(*node)) {
        match worker.phase(key) {
            Some(Phase::Failed(message)) => {
                failed.get_or_insert_with(|| format!("worker {}: {message}", worker.name));
            }
            Some(Phase::Ready | Phase::Preparing) | None => return Readiness::Preparing,
        }
    }
    match failed {
        Some(message) => Readiness::PrepareFailed(message),
        None => Readiness::Away(nodes.iter().map(|node| node.as_str()).collect::<Vec<_>>().join(", ")),
    }
}

/// A revision's key.
pub(crate) fn revision_key(function: &FunctionKey, revision: &RevisionRecord) -> RevisionKey {
    RevisionKey { function: function.clone(), revision: revision.number }
}

impl Readiness {
    /// The condition's CamelCase reason.
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

    /// What a person reads.
    pub(crate) fn message(&self) -> String {
        match self {
            Self::Prepared(1) => "ready on 1 worker".to_owned(),
            Self::Prepared(workers) => format!("ready on {workers} workers"),
            Self::Preparing => "the model is on its way to the workers".to_owned(),
            Self::PrepareFailed(message) => message.clone(),
            Self::Unplaced(why) => format!("it is placed nowhere: {why}"),
            Self::Away(nodes) => format!("it is placed on {nodes}, not attached to this controller now"),
            Self::NoWorker => "no worker is attached: start one".to_owned(),
            Self::Disabled => "unloaded: load it to serve".to_owned(),
        }
    }
}
