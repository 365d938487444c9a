//! The documents of the controllers' status and of the scaling signal.

use millrace_client::messages as wire;
use serde::Serialize;

use crate::output::text::non_empty;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClusterStatusDocument {
    cluster_id: String,
    cluster_version: u64,
    answered_by: u64,
    leader: Option<u64>,
    term: u64,
    quorum: bool,
    changing: bool,
    warnings: Vec<String>,
    controllers: Vec<Controller>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Controller {
    id: u64,
    role: Option<&'static str>,
    voter: bool,
    reachable: bool,
    unreachable_reason: Option<String>,
    client_address: Option<String>,
    internal_address: String,
    build: Option<String>,
    term: Option<u64>,
    last_log_index: Option<u64>,
    last_applied_index: Option<u64>,
    snapshot_index: Option<u64>,
    matched_index: Option<u64>,
    lag: Option<u64>,
    directory: String,
}

/// Returns the word for a controller's role, or `None` if the controller did not report its role.
pub(crate) fn role(controller: &wire::Controller) -> Option<&'static str> {
    match controller.role() {
        wire::ControllerRole::Unspecified => None,
        wire::ControllerRole::Leader => Some("Leader"),
        wire::ControllerRole::Follower => Some("Follower"),
        wire::ControllerRole::Candidate => Some("Candidate"),
        wire::ControllerRole::Learner => Some("Learner"),
    }
}

/// The number of nodes that the cluster needs, and the reasons.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ScalingDocument {
    nodes_needed: u32,
    nodes_now: u32,
    reasons: Vec<ScalingReason>,
}

#[derive(Debug, Serialize)]
struct ScalingReason {
    reason: String,
    message: String,
}

impl From<wire::ScalingSignal> for ScalingDocument {
    fn from(signal: wire::ScalingSignal) -> Self {
        let reason = |it: wire::ScalingReason| ScalingReason { reason: it.reason, message: it.message };
        Self {
            nodes_needed: signal.nodes_needed,
            nodes_now: signal.nodes_now,
            reasons: signal.reasons.into_iter().map(reason).collect(),
        }
    }
}

impl From<wire::ClusterStatus> for ClusterStatusDocument {
    fn from(status: wire::ClusterStatus) -> Self {
        Self {
            cluster_id: status.cluster_id,
            cluster_version: status.cluster_version,
            answered_by: status.answered_by,
            leader: Some(status.leader).filter(|&leader| leader > 0),
            term: status.term,
            quorum: status.quorum,
            changing: status.changing,
            warnings: status.warnings,
            controllers: status.controllers.into_iter().map(Controller::from).collect(),
        }
    }
}

impl From<wire::Controller> for Controller {
    fn from(controller: wire::Controller) -> Self {
        let role = role(&controller);
        let counted = |number: u64| controller.reachable.then_some(number);
        Self {
            id: controller.id,
            role,
            voter: controller.voter,
            reachable: controller.reachable,
            term: counted(controller.term),
            last_log_index: counted(controller.last_log_index),
            last_applied_index: counted(controller.last_applied_index),
            snapshot_index: counted(controller.snapshot_index),
            unreachable_reason: non_empty(controller.unreachable_reason),
            client_address: non_empty(controller.client_address),
            internal_address: controller.internal_address,
            build: non_empty(controller.build),
            matched_index: controller.matched_index,
            lag: controller.lag,
            directory: controller.directory,
        }
    }
}
