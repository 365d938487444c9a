//! The next trial of a profile (F04, F05): which node runs the trial, and on which part of a GPU.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use millrace_cluster_state::operations::{OperationKind, OperationRecord};
use millrace_cluster_state::{NodeRecord, NodeStatus, State};
use millrace_slices::profiling::{ProfileCoverage, next_trial};
use millrace_types::profile::TrialSetting;
use millrace_types::{NodeName, RevisionKey};

use crate::fleet::{AttachedWorker, Workers};

/// The next step of a running profile.
#[derive(Debug)]
pub(crate) enum ProfileStep {
    /// A trial on a node.
    Trial(NextTrial),
    /// Every trial is done.
    Complete,
    /// The function has another model than the profile.
    ModelChanged,
    /// No node can run a trial now.
    Wait(ProfileWait),
}

/// A trial to run.
#[derive(Debug)]
pub(crate) struct NextTrial {
    pub(crate) worker: Arc<AttachedWorker>,
    pub(crate) revision: RevisionKey,
    pub(crate) setting: TrialSetting,
}

/// The reason why no node can run a trial now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProfileWait {
    /// The function is ready on no node.
    NotReady,
    /// No node with the function shares its GPUs.
    NotShared,
    /// A node runs a single trial at a time.
    NodesTaken,
}

impl fmt::Display for ProfileWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotReady => "the function is ready on no node: see 'millrace describe function NAME'",
            Self::NotShared => {
                "no node with the function shares its GPUs: 'millrace policy set --gpu-sharing slices' shares emulated GPUs"
            }
            Self::NodesTaken => "the nodes with the function run other trials",
        })
    }
}

/// Returns the next step of a profile. `taken` are the nodes that run a trial; `None` for an operation that is no
/// running profile.
pub(crate) fn next_step(
    state: &State,
    workers: &Workers,
    operation: &OperationRecord,
    taken: &BTreeSet<NodeName>,
) -> Option<ProfileStep> {
    let OperationKind::ProfileFunction { function, digest, grid } = &operation.kind else { return None };
    if !operation.is_running() {
        return None;
    }
    // A deleted function ends the operation with its own command.
    let record = state.function(function)?;
    let latest = record.latest();
    if latest.digest != *digest {
        return Some(ProfileStep::ModelChanged);
    }
    let revision = RevisionKey { function: function.clone(), revision: latest.number };
    let wait = |why| Some(ProfileStep::Wait(why));
    let nodes = state.placements_of(function).filter_map(|placement| state.node(&placement.node));
    let live = nodes.filter(|node| node.status == NodeStatus::Live);
    let attached = live.filter_map(|node| Some((node, workers.get(&node.name)?)));
    let ready: Vec<_> = attached.filter(|(_, worker)| worker.is_ready(&revision)).collect();
    if ready.is_empty() {
        return wait(ProfileWait::NotReady);
    }
    let shared: Vec<_> = ready.into_iter().filter(|(_, worker)| worker.shares_gpus() == Some(true)).collect();
    if shared.is_empty() {
        return wait(ProfileWait::NotShared);
    }
    let coverage = if *grid { ProfileCoverage::Grid } else { ProfileCoverage::Curve };
    let missing = |node: &NodeRecord| {
        let types: BTreeSet<_> = node.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
        types
            .into_iter()
            .find_map(|gpu_type| next_trial(state.points_of(operation.id, digest, gpu_type), coverage))
    };
    let unfinished = shared.iter().filter_map(|(node, worker)| Some((node, *worker, missing(node)?)));
    let unfinished: Vec<_> = unfinished.collect();
    if unfinished.is_empty() {
        return Some(ProfileStep::Complete);
    }
    let free = unfinished.into_iter().filter(|(node, ..)| !taken.contains(&node.name));
    // The node with the fewest requests is disturbed least.
    let least = free.min_by_key(|(_, worker, _)| worker.with_load(|load| load.assigned));
    match least {
        None => wait(ProfileWait::NodesTaken),
        Some((_, worker, setting)) => {
            Some(ProfileStep::Trial(NextTrial { worker: Arc::clone(worker), revision, setting }))
        }
    }
}
