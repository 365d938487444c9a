//! The status of each controller, as reported by itself. Available without a quorum too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use millrace_cluster_state::RulesVersion;
use millrace_proto::BUILD;
use millrace_proto::admin as api;
use millrace_raft_store::{GroupMember, LogId, StateDigest};
use millrace_types::{Failure, Reason};
use openraft::{Membership, ServerState};
use serde::{Deserialize, Serialize};

use super::disks::DiskReport;
use super::divergence;
use super::failures::stopped;
use super::peers::{PeerClient, TrafficClass};
use super::replica::Replica;
use super::rules;
use super::unfinished_change::is_joint;

/// The timeout of a controller's status report; a slower controller counts as unreachable.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);
/// The offset of a controller's clock from the cluster's time that yields a warning.
const CLOCK_APART_MAX: Duration = Duration::from_secs(10);

/// A controller's report about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerStatus {
    role: Role,
    pub(super) leader: Option<u64>,
    term: u64,
    last_log: u64,
    last_applied: u64,
    snapshot: u64,
    /// The last log index that a leader knows each member to have; `None` if not a leader.
    matched: Option<BTreeMap<u64, Option<u64>>>,
    build: String,
    client_address: String,
    /// The state of the disk; the default from builds without this report.
    #[serde(default)]
    pub(super) disk: DiskReport,
    /// The offset of the controller's clock from the cluster's time, in milliseconds; positive if
    /// ahead.
    #[serde(default)]
    ahead_ms: Option<i64>,
    /// The shared object store for model files; empty if the controller uses the local disk.
    #[serde(default)]
    shared_models: String,
    /// The newest rules that the controller's build knows.
    #[serde(default)]
    pub(super) newest_rules: RulesVersion,
    /// The newest digests of the controller's state.
    #[serde(default)]
    pub(super) digests: Vec<StateDigest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Role {
    Leader,
    Follower,
    Candidate,
    Learner,
}

impl PeerStatus {
    /// Returns the number of entries that a member lacks, if this is a leader and the number is known.
    pub(super) fn lag(&self, id: u64) -> Option<u64> {
        let matched = self.matched.as_ref()?.get(&id).copied().flatten()?;
        Some(self.last_log.saturating_sub(matched))
    }
}

impl From<Role> for api::ControllerRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Leader => Self::Leader,
            Role::Follower => Self::Follower,
            Role::Candidate => Self::Candidate,
            Role::Learner => Self::Learner,
        }
    }
}

impl Replica {
    /// Returns this controller's report.
    pub(super) fn own_status(&self) -> PeerStatus {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        let index = |position: Option<LogId>| position.map_or(0, |position| position.index);
        let role = match metrics.state {
            ServerState::Leader => Role::Leader,
            ServerState::Candidate => Role::Candidate,
            ServerState::Learner => Role::Learner,
            ServerState::Follower | ServerState::Shutdown => Role::Follower,
        };
        let matched = metrics.replication.as_ref().map(|replication| {
            replication.iter().map(|(&id, matched)| (id, matched.map(|matched| matched.index))).collect()
        });
        PeerStatus {
            role,
            leader: metrics.current_leader,
            term: metrics.current_term,
            last_log: metrics.last_log_index.unwrap_or(0),
            last_applied: index(metrics.last_applied),
            snapshot: index(metrics.snapshot),
            matched,
            build: BUILD.into(),
            client_address: self.client_address.to_string(),
            disk: DiskReport::from(self.disk.health()),
            ahead_ms: self.time.ahead_ms(),
            shared_models: self.shared_models().to_owned(),
            newest_rules: RulesVersion::NEWEST,
            digests: self.reader.digests().borrow().to_vec(),
        }
    }

    /// Returns this controller's report for others. A halted controller returns a failure, because such
    /// a controller takes no part in the group.
    pub(super) fn sound_status(&self) -> Result<PeerStatus, Failure> {
        if let Some(error) = self.diverged() {
            return Err(Failure::new(Reason::NoLeader, error.to_string()));
        }
        match &self.raft.metrics().borrow().running_state {
            Ok(()) => {}
            Err(error) => return Err(stopped(error)),
        }
        Ok(self.own_status())
    }

    /// Asks every member for its report, in parallel.
    pub(super) async fn statuses(&self) -> BTreeMap<u64, Result<PeerStatus, Failure>> {
        let asked = join_all(self.others(TrafficClass::Requests).into_iter().map(ask)).await;
        let own = (self.id().0, self.sound_status());
        asked.into_iter().chain([own]).collect()
    }

    /// Returns the status of the whole group, from the reports that arrive.
    pub(crate) async fn cluster_status(&self) -> api::ClusterStatus {
        let statuses = self.statuses().await;
        let membership = self.membership();
        view(self, &membership, &statuses)
    }
}

async fn ask(peer: PeerClient) -> (u64, Result<PeerStatus, Failure>) {
    let status =
        peer.call(STATUS_TIMEOUT, &(), async |mut client, message| client.get_status(message).await).await;
    (peer.id(), status)
}

fn view(
    replica: &Replica,
    membership: &Membership<u64, GroupMember>,
    statuses: &BTreeMap<u64, Result<PeerStatus, Failure>>,
) -> api::ClusterStatus {
    let answers = || statuses.iter().filter_map(|(&id, status)| Some((id, status.as_ref().ok()?)));
    // Two controllers may believe to lead for a moment: the later term is right.
    let leader = answers().filter(|(_, it)| it.role == Role::Leader).max_by_key(|(_, it)| it.term);
    let voters: BTreeSet<u64> = membership.voter_ids().collect();
    let reachable: BTreeSet<u64> = answers().map(|(id, _)| id).collect();
    let up = voters.intersection(&reachable).count();
    let controllers = membership.nodes().map(|(&id, member)| {
        controller(id, member, voters.contains(&id), statuses.get(&id), leader.map(|(_, it)| it))
    });
    let places = answers().map(|(id, status)| (id, status.shared_models.as_str())).collect();
    let state = replica.state();
    let shared = state.artifacts().filter(|artifact| artifact.in_store()).count();
    let mut warnings = rules::warnings(&voters, &reachable);
    warnings.extend(rules::place_warning(&places, shared));
    let digests = answers().map(|(id, status)| (id, status.digests.clone())).collect();
    let differ = divergence::find(membership.get_joint_config(), &digests);
    warnings.extend(differ.map(|found| found.warning()));
    api::ClusterStatus {
        cluster_id: replica.own().cluster.to_string(),
        cluster_version: state.rules().0,
        answered_by: replica.id().0,
        leader: leader.map_or(0, |(id, _)| id),
        term: answers().map(|(_, it)| it.term).max().unwrap_or(0),
        controllers: controllers.collect(),
        quorum: leader.is_some() && up > voters.len() / 2,
        changing: is_joint(membership),
        warnings: [warnings, machine_warnings(answers())].concat(),
    }
}

/// Returns the warnings about the machines that answered.
fn machine_warnings<'a>(answers: impl Iterator<Item = (u64, &'a PeerStatus)>) -> Vec<String> {
    let of = |(id, status): (u64, &PeerStatus)| [status.disk.warning(id), clock_warning(id, status.ahead_ms)];
    answers.flat_map(of).flatten().collect()
}

fn clock_warning(id: u64, ahead_ms: Option<i64>) -> Option<String> {
    let apart = Duration::from_millis(ahead_ms?.unsigned_abs());
    let side = if ahead_ms? > 0 { "ahead of" } else { "behind" };
    (apart >= CLOCK_APART_MAX).then(|| {
        format!(
            "the clock of controller {id} is {}s {side} the cluster's time, which follows the leader's at its own pace: synchronize the clocks of the controllers' machines",
            apart.as_secs()
        )
    })
}

fn controller(
    id: u64,
    member: &GroupMember,
    voter: bool,
    status: Option<&Result<PeerStatus, Failure>>,
    leader: Option<&PeerStatus>,
) -> api::Controller {
    let lag = leader.and_then(|leader| leader.lag(id));
    let known = api::Controller {
        id,
        internal_address: member.address.clone(),
        voter,
        directory: member.directory.clone(),
        matched_index: leader.zip(lag).map(|(leader, lag)| leader.last_log - lag),
        lag,
        ..api::Controller::default()
    };
    match status {
        Some(Ok(status)) => api::Controller {
            reachable: true,
            role: api::ControllerRole::from(status.role).into(),
            client_address: status.client_address.clone(),
            build: status.build.clone(),
            term: status.term,
            last_log_index: status.last_log,
            last_applied_index: status.last_applied,
            snapshot_index: status.snapshot,
            ..known
        },
        Some(Err(failure)) => api::Controller { unreachable_reason: failure.message.clone(), ..known },
        // The member joined while the others were asked.
        None => api::Controller {
            unreachable_reason: "not asked yet: the controller has just joined".into(),
            ..known
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_far_off_yields_a_warning() {
        let apart = |ahead_ms| clock_warning(2, ahead_ms);
        assert_eq!([None, Some(0), Some(9_999), Some(-9_999)].map(apart), [const { None }; 4]);
        let ahead = apart(Some(86_400_000)).unwrap();
        let behind = apart(Some(-20_000)).unwrap();
        assert!(
            ahead.starts_with("the clock of controller 2 is 86400s ahead of the cluster's time"),
            "{ahead}"
        );
        assert!(behind.starts_with("the clock of controller 2 is 20s behind the cluster's time"), "{behind}");
    }
}
