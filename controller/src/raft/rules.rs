//! Decides which membership changes are safe. Pure: the input is the known state of the group, the
//! output a refusal with a remedy.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::{Artifact, ControllerId};
use millrace_types::{Failure, Reason};
use serde::{Deserialize, Serialize};

/// The maximum number of voters: each additional voter makes every write wait for more disks.
pub(super) const VOTERS_MAX: usize = 5;
/// The largest lag of a learner to be promoted, in entries: roughly the entries in flight while writes
/// continue. After the promotion, a majority must not have to wait for the new voter to catch up.
pub(super) const PROMOTION_LAG_MAX: u64 = 1_000;

/// A membership change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MembershipRequest {
    /// Promotes a learner to a voter.
    Promote(u64),
    /// Removes a member.
    Remove(u64),
}

/// The group as known to the leader.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct GroupStatus {
    pub(super) leader: u64,
    pub(super) voters: BTreeSet<u64>,
    pub(super) learners: BTreeSet<u64>,
    /// Members that answer, including the leader.
    pub(super) reachable: BTreeSet<u64>,
    /// Log entries that each member lacks; a member of unknown lag is absent.
    pub(super) lag: BTreeMap<u64, u64>,
}

/// The action that carries out a safe change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MembershipChange {
    /// The change is in effect already.
    Nothing,
    AddVoter(u64),
    RemoveVoter(u64),
    RemoveLearner(u64),
}

/// Checks that a change is safe, and returns the action.
pub(super) fn check(group: &GroupStatus, change: MembershipRequest) -> Result<MembershipChange, Failure> {
    match change {
        MembershipRequest::Promote(id) => promote(group, id),
        MembershipRequest::Remove(id) => remove(group, id),
    }
}

fn promote(group: &GroupStatus, id: u64) -> Result<MembershipChange, Failure> {
    if group.voters.contains(&id) {
        return Ok(MembershipChange::Nothing);
    }
    if !group.learners.contains(&id) {
        return unknown(id);
    }
    if group.voters.len() >= VOTERS_MAX {
        return refused(format!("there are {VOTERS_MAX} voters already: remove one first"));
    }
    match group.lag.get(&id) {
        Some(&lag) if lag <= PROMOTION_LAG_MAX => Ok(MembershipChange::AddVoter(id)),
        Some(lag) => lagging(format!(
            "controller {id} is {lag} entries behind, and at most {PROMOTION_LAG_MAX} are allowed: wait until the controller has caught up"
        )),
        None => lagging(format!(
            "controller {id} has not received any entry from the leader yet: make sure that the controller runs, and wait"
        )),
    }
}

fn remove(group: &GroupStatus, id: u64) -> Result<MembershipChange, Failure> {
    if group.learners.contains(&id) {
        return Ok(MembershipChange::RemoveLearner(id));
    }
    if !group.voters.contains(&id) {
        return unknown(id);
    }
    if group.voters.len() == 1 {
        return refused(format!(
            "controller {id} is the last voter: without it the cluster would cease to exist"
        ));
    }
    if group.leader == id {
        return refused(format!(
            "controller {id} leads: transfer leadership first ('millrace cluster transfer')"
        ));
    }
    let left: BTreeSet<u64> = group.voters.iter().copied().filter(|&voter| voter != id).collect();
    let up = left.intersection(&group.reachable).count();
    if up <= left.len() / 2 {
        return refused(format!(
            "only {up} of {} remaining voters answer: without a majority the cluster could not accept writes; bring a voter back first",
            left.len()
        ));
    }
    Ok(MembershipChange::RemoveVoter(id))
}

/// Checks that the model files in use stay safe without a member. Each file needs one remaining holder,
/// and a majority of the remaining voters if the leaving member can still provide copies. A dead member
/// cannot, so the removal must not wait: the replacement restores the copies.
pub(super) fn keeps_models<'a>(
    group: &GroupStatus,
    leaving: u64,
    mut used: impl Iterator<Item = &'a Artifact>,
) -> Result<(), Failure> {
    used.try_for_each(|artifact| keeps_model(group, leaving, artifact))
}

fn keeps_model(group: &GroupStatus, leaving: u64, artifact: &Artifact) -> Result<(), Failure> {
    let holds = |id: &u64| artifact.holders.contains(&ControllerId(*id));
    if artifact.in_store() || !holds(&leaving) {
        return Ok(());
    }
    let voters = || group.voters.iter().copied().filter(|&id| id != leaving);
    let learners = group.learners.iter().copied().filter(|&id| id != leaving);
    let kept = voters().chain(learners).any(|id| holds(&id));
    let alive = group.reachable.contains(&leaving);
    let short = voters().filter(holds).count() <= voters().count() / 2;
    if kept && !(short && alive && group.voters.contains(&leaving)) {
        return Ok(());
    }
    let digest = artifact.digest;
    if !alive {
        return lagging(format!(
            "controller {leaving} is the only holder of model file {digest}, and does not answer: start the controller and try again after another one has copied the file, or delete the functions that use the file ('millrace get functions')"
        ));
    }
    let missing = || voters().filter(|id| !holds(id));
    // Prefer a voter that answers: the others copy the file after their return.
    let next = missing().find(|id| group.reachable.contains(id)).or_else(|| missing().next());
    let to = next.map_or_else(|| "another controller".to_owned(), |id| format!("controller {id}"));
    lagging(format!("model file {digest} is still being copied to {to}: try again soon"))
}

fn unknown<T>(id: u64) -> Result<T, Failure> {
    refused(format!("there is no controller {id} in the group: list them with 'millrace cluster status'"))
}

fn refused<T>(message: String) -> Result<T, Failure> {
    Err(Failure::new(Reason::MembershipRefused, message))
}

fn lagging<T>(message: String) -> Result<T, Failure> {
    Err(Failure { retryable: true, ..Failure::new(Reason::MembershipRefused, message) })
}

/// The maximum number of members. Each member is in every log entry that changes the group.
pub(super) const MEMBERS_MAX: usize = 32;
/// The longest address of a member, in bytes: a host name has 253 bytes at most.
pub(super) const ADDRESS_BYTES_MAX: usize = 260;
/// The longest name of a data directory, in bytes.
pub(super) const DIRECTORY_BYTES_MAX: usize = 128;

/// A controller that wants to be a member, as its request describes the controller.
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinAnnouncement<'a> {
    pub(super) id: u64,
    pub(super) address: &'a str,
    pub(super) directory: &'a str,
}

/// Checks whether a controller may act as the member of that number, in a group of `members` members.
/// `known` is the data directory that the group stores for that number.
pub(super) fn admit(
    announced: JoinAnnouncement<'_>,
    known: Option<&str>,
    members: usize,
) -> Result<(), Failure> {
    let JoinAnnouncement { id, address, directory } = announced;
    if id == 0 {
        return refused("controllers are numbered from 1: give this one another id".to_owned());
    }
    // A log entry that is too long to write would end the leader.
    if address.len() > ADDRESS_BYTES_MAX {
        return refused(format!("the address has {} bytes: at most {ADDRESS_BYTES_MAX}", address.len()));
    }
    if directory.len() > DIRECTORY_BYTES_MAX {
        let len = directory.len();
        return refused(format!("the data directory's name has {len} bytes: at most {DIRECTORY_BYTES_MAX}"));
    }
    if known.is_none() && members >= MEMBERS_MAX {
        return refused(format!("the group has {members} members, the maximum: remove one first"));
    }
    match known {
        Some(known) if known != directory => {
            let message = format!(
                "controller {id} is a member already, with another data directory, and without that directory its votes and acknowledged writes may be lost: remove the member ('millrace cluster remove {id}') and start this controller with an id that was never used"
            );
            Err(Failure::new(Reason::PeerMismatch, message))
        }
        _ => Ok(()),
    }
}

/// Returns warnings for the operator about a group with these voters, if only the `reachable` voters
/// answer.
pub(super) fn warnings(voters: &BTreeSet<u64>, reachable: &BTreeSet<u64>) -> Vec<String> {
    let mut warnings = Vec::new();
    let all = voters.len();
    let up = voters.intersection(reachable).count();
    if all > 0 && all.is_multiple_of(2) {
        warnings.push(format!(
            "{all} voters tolerate the loss of {}, the same as {} voters: run 1, 3 or 5",
            (all - 1) / 2,
            all - 1
        ));
    }
    if up <= all / 2 {
        warnings
            .push(format!("{up} of {all} voters answer: without a majority the cluster accepts no writes"));
    } else if up < all && up == all / 2 + 1 {
        warnings
            .push(format!("{up} of {all} voters answer: after one more loss the cluster accepts no writes"));
    }
    warnings
}

/// Returns a warning if controllers use different object stores (empty: none), or if `shared` model
/// files are in an object store that no answering controller uses.
pub(super) fn place_warning(places: &BTreeMap<u64, &str>, shared: usize) -> Option<String> {
    let distinct: BTreeSet<&str> = places.values().copied().collect();
    if distinct.len() > 1 {
        let each = places.iter().map(|(id, place)| match *place {
            "" => format!("controller {id}: its own disk"),
            place => format!("controller {id}: {place}"),
        });
        let each: Vec<_> = each.collect();
        return Some(format!(
            "controllers store model files in different places ({}): start all controllers with the same --artifacts",
            each.join(", ")
        ));
    }
    (shared > 0 && distinct.contains("")).then(|| {
        format!(
            "{shared} model files are in an object store that no answering controller uses: start all controllers with their former --artifacts"
        )
    })
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::{CallerName, UnixMillis};
    use millrace_types::{Bytes, Digest};

    use super::*;

    fn group(voters: &[u64], learners: &[u64], reachable: &[u64]) -> GroupStatus {
        GroupStatus {
            leader: 1,
            voters: voters.iter().copied().collect(),
            learners: learners.iter().copied().collect(),
            reachable: reachable.iter().copied().collect(),
            lag: reachable.iter().map(|&id| (id, 0)).collect(),
        }
    }

    fn refusal(group: &GroupStatus, change: MembershipRequest) -> String {
        let failure = check(group, change).unwrap_err();
        assert_eq!(failure.reason, Reason::MembershipRefused);
        failure.message
    }

    #[test]
    fn only_a_learner_that_has_the_log_is_promoted() {
        let mut three = group(&[1, 2], &[3, 4], &[1, 2, 3]);
        assert_eq!(check(&three, MembershipRequest::Promote(3)), Ok(MembershipChange::AddVoter(3)));
        assert_eq!(check(&three, MembershipRequest::Promote(2)), Ok(MembershipChange::Nothing));
        three.lag.insert(3, PROMOTION_LAG_MAX + 1);
        let lagging = check(&three, MembershipRequest::Promote(3)).unwrap_err();
        assert!(lagging.retryable && lagging.message.contains("1001 entries behind"), "{lagging}");
        assert!(check(&three, MembershipRequest::Promote(4)).unwrap_err().retryable);
        assert!(refusal(&three, MembershipRequest::Promote(9)).contains("no controller 9"));
        let full = group(&[1, 2, 3, 4, 5], &[6], &[1, 2, 3, 4, 5, 6]);
        assert!(refusal(&full, MembershipRequest::Promote(6)).contains("5 voters already"));
    }

    #[test]
    fn a_member_that_the_group_needs_is_not_removed() {
        assert!(refusal(&group(&[1], &[], &[1]), MembershipRequest::Remove(1)).contains("last voter"));
        let three = group(&[1, 2, 3], &[4], &[1, 2, 3]);
        assert!(refusal(&three, MembershipRequest::Remove(1)).contains("transfer"));
        assert!(refusal(&three, MembershipRequest::Remove(7)).contains("no controller 7"));
        assert_eq!(check(&three, MembershipRequest::Remove(4)), Ok(MembershipChange::RemoveLearner(4)));
        assert_eq!(check(&three, MembershipRequest::Remove(3)), Ok(MembershipChange::RemoveVoter(3)));
        let one_down = group(&[1, 2, 3], &[], &[1, 2]);
        assert_eq!(
            check(&one_down, MembershipRequest::Remove(3)),
            Ok(MembershipChange::RemoveVoter(3)),
            "a dead voter"
        );
        assert!(
            refusal(&one_down, MembershipRequest::Remove(2)).contains("only 1 of 2"),
            "a live voter that the majority needs"
        );
    }

    fn model(holders: &[u64]) -> Artifact {
        Artifact {
            digest: Digest::of(b"m"),
            bytes: Bytes(1),
            model: crate::fixtures::bare_model(),
            holders: holders.iter().copied().map(ControllerId).collect(),
            uses: 1,
            touched_at: UnixMillis(1),
            created_by: CallerName("test".into()),
            profiles: Vec::new(),
        }
    }

    #[test]
    fn a_removal_that_would_lose_a_model_file_is_refused() {
        let check = |group: &GroupStatus, leaving, holders: &[u64], expected: Option<&str>| {
            let checked = keeps_models(group, leaving, [model(holders)].iter());
            let Some(expected) = expected else {
                assert_eq!(checked, Ok(()), "{leaving} of {holders:?}");
                return;
            };
            let refused = checked.unwrap_err();
            assert!(refused.retryable && refused.reason == Reason::MembershipRefused, "{refused}");
            assert!(refused.message.contains(expected), "{leaving} of {holders:?}: {refused}");
        };
        let three = group(&[1, 2, 3], &[4], &[1, 2, 3, 4]);
        check(&three, 3, &[1, 2, 3], None);
        check(&three, 3, &[1, 2], None);
        check(&three, 3, &[1, 3], Some("copied to controller 2"));
        check(&three, 3, &[3], Some("copied to controller 1"));
        check(&three, 3, &[0, 3], None);
        // A learner counts as a copy, but not towards the majority.
        check(&three, 3, &[3, 4], Some("copied to controller 1"));
        check(&three, 4, &[3, 4], None);
        check(&three, 4, &[4], Some("copied to controller 1"));

        let dead = group(&[1, 2, 3], &[4], &[1, 2]);
        check(&dead, 3, &[1, 3], None);
        check(&dead, 3, &[3, 4], None);
        check(&dead, 4, &[1, 4], None);
        check(&dead, 3, &[3], Some("delete the functions"));
        check(&dead, 3, &[9], None);
        // The named controller answers and can make the copy.
        let five = group(&[1, 2, 3, 4, 5], &[], &[1, 3, 4, 5]);
        check(&five, 5, &[1, 4, 5], Some("copied to controller 3"));
        check(&five, 5, &[1, 3, 4, 5], None);
        check(&five, 2, &[1, 2, 4], None);

        let mixed = [model(&[1, 2, 3]), model(&[3])];
        assert!(keeps_models(&three, 3, mixed.iter()).is_err());
        assert_eq!(keeps_models(&three, 3, [].iter()), Ok(()));
    }

    #[test]
    fn a_controller_with_another_directory_is_not_accepted_as_the_member() {
        let admit = |id, directory, known| {
            super::admit(JoinAnnouncement { id, address: "b:7070", directory }, known, MEMBERS_MAX - 1)
        };
        assert_eq!(admit(2, "b", None), Ok(()));
        assert_eq!(admit(2, "b", Some("b")), Ok(()));
        let wiped = admit(2, "new", Some("b")).unwrap_err();
        assert_eq!(wiped.reason, Reason::PeerMismatch);
        assert!(wiped.message.contains("millrace cluster remove 2"), "{wiped}");
        assert!(admit(0, "b", None).is_err());
    }

    #[test]
    fn a_member_with_a_too_long_address_or_directory_is_refused() {
        let address = "a".repeat(ADDRESS_BYTES_MAX);
        let directory = "d".repeat(DIRECTORY_BYTES_MAX);
        let longest = JoinAnnouncement { id: 2, address: &address, directory: &directory };
        assert_eq!(admit(longest, None, MEMBERS_MAX - 1), Ok(()));
        assert!(admit(JoinAnnouncement { address: &format!("{address}a"), ..longest }, None, 1).is_err());
        assert!(admit(JoinAnnouncement { directory: &format!("{directory}d"), ..longest }, None, 1).is_err());
        assert!(admit(longest, None, MEMBERS_MAX).is_err());
        assert_eq!(admit(longest, Some(&directory), MEMBERS_MAX), Ok(()), "an existing member");
    }

    #[test]
    fn controllers_with_different_object_stores_yield_a_warning() {
        let check = |places: &[(u64, &str)], shared: usize, expected: Option<&str>| {
            let warning = place_warning(&places.iter().copied().collect(), shared);
            let found = warning.as_deref();
            assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
            assert!(expected.is_none_or(|part| found.is_some_and(|it| it.contains(part))), "{found:?}");
        };
        check(&[(1, ""), (2, "")], 0, None);
        check(&[(1, "s3://a"), (2, "s3://a")], 3, None);
        check(&[(1, "s3://a"), (2, "")], 0, Some("controller 2: its own disk"));
        check(&[(1, "s3://a"), (2, "s3://b")], 0, Some("controller 1: s3://a, controller 2: s3://b"));
        check(&[(1, ""), (2, "")], 3, Some("3 model files are in an object store"));
        check(&[], 0, None);
    }

    #[test]
    fn even_groups_and_majorities_without_a_spare_yield_a_warning() {
        let check = |voters: &[u64], reachable: &[u64], expected: &[&str]| {
            let group = group(voters, &[], reachable);
            let found = warnings(&group.voters, &group.reachable);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            assert!(found.iter().zip(expected).all(|(found, part)| found.contains(part)), "{found:?}");
        };
        check(&[1], &[1], &[]);
        check(&[1, 2, 3], &[1, 2, 3], &[]);
        check(&[1, 2], &[1, 2], &["run 1, 3 or 5"]);
        check(&[1, 2, 3], &[1, 3], &["after one more loss"]);
        check(&[1, 2, 3], &[2], &["without a majority"]);
    }
}
