//! Whether a function can serve, from the state and what its workers report. The one rule behind
//! the admin API's conditions and the protocol's readiness.

use millrace_cluster_state::{Function, RevisionRecord};
use millrace_types::{FunctionKey, RevisionKey};

use super::{Phase, Workers};

/// Whether one revision can be invoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Ready on this many workers.
    Prepared(usize),
    /// Being prepared on at least one.
    Preparing,
    /// Every worker failed; what the first one said.
    PrepareFailed(String),
    /// No worker is attached.
    NoWorker,
    /// Its owner unloaded it.
    Disabled,
}

/// How far a revision is.
pub(crate) fn of_revision(function: &Function, revision: &RevisionRecord, workers: &Workers) -> Readiness {
    if !function.enabled {
        return Readiness::Disabled;
    }
    let key = revision_key(&function.key, revision);
    let mut ready = 0;
    let mut preparing = false;
    let mut failed = None;
    for worker in workers.values() {
        match worker.phase(&key) {
            Some(Phase::Ready) => ready += 1,
            Some(Phase::Failed(message)) => {
                failed.get_or_insert_with(|| format!("worker {}: {message}", worker.name));
            }
            Some(Phase::Preparing) | None => preparing = true,
        }
    }
    match failed {
        _ if ready > 0 => Readiness::Prepared(ready),
        _ if preparing => Readiness::Preparing,
        Some(message) => Readiness::PrepareFailed(message),
        None => Readiness::NoWorker,
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
            Self::NoWorker => "NoWorker",
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
            Self::NoWorker => "no worker is attached: start one".to_owned(),
            Self::Disabled => "unloaded: load it to serve".to_owned(),
        }
    }
}
