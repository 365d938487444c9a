//! Membership changes, made by the leader: joins, promotions of learners to voters, and removals.
//! [`super::rules`] decides which changes are safe.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_cluster_state::{CallerName, KnownRules, RulesVersion, State};
use millrace_proto::admin as api;
use millrace_proto::raft::{JoinIntent as Intent, JoinRequest, JoinResponse};
use millrace_raft_store::{ClusterConfig, GroupMember};
use millrace_types::{Failure, Reason};
use openraft::ChangeMembers;
use openraft::error::{ClientWriteError, RaftError};
use openraft::raft::ClientWriteResponse;
use serde::{Deserialize, Serialize};

use super::codec::check_versions;
use super::failures::{nobody_leads, stopped};
use super::peers::PeerClient;
use super::replica::{KnownLeader, Replica};
use super::route::leads_no_more;
use super::rules::{self, GroupStatus, MembershipChange, MembershipRequest};
use super::timing::WRITE_TIMEOUT;
use super::versions::check_knows;

/// The timeout of a membership change: two entries that a majority must store.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait of a removal for other members to copy the leaving member's model files.
const COPIES_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a forwarded membership change. The leader records the beginning and the end, asks
/// all members, and confirms its leadership.
const FORWARD_TIMEOUT: Duration = CHANGE_TIMEOUT
    .saturating_add(COPIES_TIMEOUT)
    .saturating_add(WRITE_TIMEOUT)
    .saturating_add(WRITE_TIMEOUT)
    .saturating_add(Duration::from_secs(6));

type Written = Result<ClientWriteResponse<ClusterConfig>, RaftError<u64, ClientWriteError<u64, GroupMember>>>;

/// The group after a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupMembers {
    members: BTreeMap<u64, GroupMember>,
    voters: BTreeSet<u64>,
    warnings: Vec<String>,
    /// The id of the change's operation; 0 if nothing had to change.
    operation: u64,
}

impl From<GroupMembers> for api::ChangeMembershipResponse {
    fn from(group: GroupMembers) -> Self {
        let members = group.members.iter().map(|(&id, member)| api::Member {
            id,
            internal_address: member.address.clone(),
            voter: group.voters.contains(&id),
        });
        let operation = if group.operation == 0 { String::new() } else { group.operation.to_string() };
        Self { members: members.collect(), warnings: group.warnings, operation }
    }
}

impl Replica {
    /// Changes the group, if the change is safe.
    ///
    /// # Errors
    /// `MEMBERSHIP_REFUSED` if the change is unsafe, `retryable` if the reason is temporary.
    /// `NO_LEADER` if no leader answers, with `may_have_executed` if the change may still take effect.
    pub(crate) async fn change_group(
        &self,
        change: MembershipRequest,
        caller: CallerName,
    ) -> Result<GroupMembers, Failure> {
        let mut attempts = self.attempts();
        loop {
            let tried = match self.leader() {
                KnownLeader::Here => self.change_here(change, caller.clone()).await,
                KnownLeader::There(leader) => forward(&leader, (change, &caller)).await,
                KnownLeader::Unknown => Err(nobody_leads()),
            };
            match tried {
                Err(failure) if again(&failure) && attempts.another().await => {}
                changed => return changed,
            }
        }
    }

    /// Changes the group; this controller must lead.
    pub(super) async fn change_here(
        &self,
        change: MembershipRequest,
        caller: CallerName,
    ) -> Result<GroupMembers, Failure> {
        if self.leading_term().is_none() {
            return Err(nobody_leads());
        }
        let group = self.group().await;
        let step = rules::check(&group, change)?;
        if step == MembershipChange::Nothing {
            return self.carry_out(&group, step, 0).await;
        }
        let operation = self.begin_change(change, caller.clone()).await?;
        tracing::info!(?change, operation, "changing the group");
        let changed = self.carry_out(&group, step, operation).await.map_err(once_begun);
        self.end_change(operation, caller, &changed).await;
        changed
    }

    async fn carry_out(
        &self,
        group: &GroupStatus,
        step: MembershipChange,
        operation: u64,
    ) -> Result<GroupMembers, Failure> {
        let only = |id| BTreeSet::from([id]);
        if let MembershipChange::RemoveVoter(leaving) | MembershipChange::RemoveLearner(leaving) = step {
            self.keep_models(group, leaving).await?;
        }
        let changes = match step {
            MembershipChange::Nothing => None,
            MembershipChange::AddVoter(id) => Some(ChangeMembers::AddVoterIds(only(id))),
            MembershipChange::RemoveVoter(id) => Some(ChangeMembers::RemoveVoters(only(id))),
            MembershipChange::RemoveLearner(id) => Some(ChangeMembers::RemoveNodes(only(id))),
        };
        if let Some(changes) = changes {
            in_time(self.raft.change_membership(changes, false)).await?;
        }
        let membership = self.membership();
        let voters: BTreeSet<u64> = membership.voter_ids().collect();
        let warnings = rules::warnings(&voters, &group.reachable);
        let members = membership.nodes().map(|(&id, member)| (id, member.clone())).collect();
        Ok(GroupMembers { members, voters, warnings, operation })
    }

    /// Waits, within bounds, until the group no longer needs the model files of a leaving member.
    async fn keep_models(&self, group: &GroupStatus, leaving: u64) -> Result<(), Failure> {
        let kept = |state: &State| {
            let used = state.artifacts().filter(|artifact| artifact.uses > 0);
            rules::keeps_models(group, leaving, used.map(|artifact| &**artifact))
        };
        let first = kept(&self.linearizable().await?);
        // A member that does not answer cannot provide copies, so waiting is pointless.
        if first.is_ok() || !group.reachable.contains(&leaving) {
            return first;
        }
        let mut applied = self.reader.watch();
        let copied = applied.wait_for(|applied| kept(&applied.state).is_ok());
        match tokio::time::timeout(COPIES_TIMEOUT, copied).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => kept(&self.state()),
        }
    }

    /// Completes a joint membership change of an earlier leader. A voter that was to be removed becomes
    /// a learner, because the group no longer knows of the intended removal.
    pub(super) async fn finish_change(&self) -> Result<(), Failure> {
        in_time(self.raft.change_membership(ChangeMembers::AddVoterIds(BTreeSet::new()), true)).await
    }

    async fn group(&self) -> GroupStatus {
        let statuses = self.statuses().await;
        let own = self.own_status();
        let membership = self.membership();
        let ids = || membership.nodes().map(|(&id, _)| id);
        GroupStatus {
            leader: self.id().0,
            voters: membership.voter_ids().collect(),
            learners: membership.learner_ids().collect(),
            reachable: ids().filter(|id| matches!(statuses.get(id), Some(Ok(_)))).collect(),
            lag: ids().filter_map(|id| Some((id, own.lag(id)?))).collect(),
        }
    }

    /// Adds a controller as a learner, or updates the address. Returns the leader's address if this
    /// controller does not lead.
    pub(super) async fn join(&self, request: JoinRequest) -> Result<JoinResponse, Failure> {
        check_versions(request.protocol_version, request.cluster_version)?;
        let cluster = self.own().cluster.to_string();
        if !request.cluster_id.is_empty() && request.cluster_id != cluster {
            let message = format!(
                "controller {} belongs to cluster {}, and this is cluster {cluster}: give that controller a data directory of its own",
                request.id, request.cluster_id
            );
            return Err(Failure::new(Reason::PeerMismatch, message));
        }
        let leader_address = match self.leader() {
            KnownLeader::Here => String::new(),
            KnownLeader::There(leader) => leader.address,
            KnownLeader::Unknown => return Err(nobody_leads()),
        };
        if leader_address.is_empty() {
            self.admit(&request).await?;
        }
        Ok(JoinResponse { cluster_id: cluster, leader_address })
    }

    async fn admit(&self, request: &JoinRequest) -> Result<(), Failure> {
        let build = KnownRules::up_to(RulesVersion(request.cluster_version));
        check_knows(request.id, build, self.reader.latest().state.rules())?;
        let membership = self.membership();
        let known = membership.get_node(&request.id);
        let JoinRequest { id, address, directory, .. } = request;
        let announced = rules::JoinAnnouncement { id: *id, address, directory };
        let known_directory = known.map(|known| known.directory.as_str());
        rules::admit(announced, known_directory, membership.nodes().count())?;
        let member = GroupMember { address: request.address.clone(), directory: request.directory.clone() };
        let intent = request.intent();
        match known {
            _ if intent == Intent::Check => Ok(()),
            Some(known) if *known == member => Ok(()),
            None if intent == Intent::Moved => Err(Failure::new(
                Reason::MembershipRefused,
                format!(
                    "controller {} was removed from the group: stop it, and start one with a new id and an empty data directory in its place",
                    request.id
                ),
            )),
            None => {
                tracing::info!(
                    id = request.id,
                    address = request.address,
                    build = request.build,
                    "adding a controller to the group"
                );
                in_time(self.raft.add_learner(request.id, member, false)).await
            }
            Some(_) => {
                tracing::info!(
                    id = request.id,
                    address = request.address,
                    "updating the address of a controller"
                );
                let moved = BTreeMap::from([(request.id, member)]);
                in_time(self.raft.change_membership(ChangeMembers::SetNodes(moved), true)).await
            }
        }
    }
}

/// Whether a change may be tried again at another leader.
fn again(failure: &Failure) -> bool {
    failure.reason == Reason::NoLeader && !failure.may_have_executed
}

/// Marks the failure of a change that has begun as possibly executed, because a retry would begin a
/// second operation.
fn once_begun(failure: Failure) -> Failure {
    match failure.reason {
        Reason::NoLeader | Reason::ShuttingDown => failure.after_execution(),
        _ => failure,
    }
}

/// Forwards a change to the leader and waits for the end. A change has no idempotency key, so an
/// abandoned change cannot be retried like a write.
async fn forward(
    leader: &PeerClient,
    change: (MembershipRequest, &CallerName),
) -> Result<GroupMembers, Failure> {
    let asked =
        leader.call(FORWARD_TIMEOUT, &change, async |mut client, message| client.change_group(message).await);
    asked.await.map_err(|failure| leads_no_more(leader, failure))
}

/// Waits for a membership change, within [`CHANGE_TIMEOUT`].
async fn in_time(change: impl Future<Output = Written>) -> Result<(), Failure> {
    match tokio::time::timeout(CHANGE_TIMEOUT, change).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_)))) => {
            Err(nobody_leads().after_execution())
        }
        Ok(Err(RaftError::APIError(ClientWriteError::ChangeMembershipError(error)))) => Err(Failure {
            retryable: true,
            ..Failure::new(
                Reason::MembershipRefused,
                format!("cannot change the group now ({error}): try again soon"),
            )
        }),
        Ok(Err(RaftError::Fatal(error))) => Err(stopped(&error)),
        Err(_) => {
            let message = format!(
                "no majority of controllers confirmed the change within {CHANGE_TIMEOUT:?}: the change may still take effect; see 'millrace cluster status'"
            );
            Err(Failure::new(Reason::NoLeader, message).after_execution())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::failures::shutting_down;
    use super::*;

    #[test]
    fn a_change_is_tried_again_only_before_it_has_begun() {
        assert!(again(&nobody_leads()));
        assert!(!again(&once_begun(nobody_leads())));
        assert!(once_begun(shutting_down()).may_have_executed, "the leader shut down after the change began");
        let refused = Failure::new(Reason::MembershipRefused, "why");
        assert!(!once_begun(refused).may_have_executed);
    }
}
