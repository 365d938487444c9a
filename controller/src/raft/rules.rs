//! Which changes of the group are safe. Pure: what is known of the group goes in, a refusal that
//! says what to do comes out.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::{Artifact, ControllerId};
use millrace_types::{Failure, Reason};
use serde::{Deserialize, Serialize};

/// The most voters: each one more makes every write wait for more disks.
pub(super) const VOTERS_MAX: usize = 5;
/// How many entries a learner may be behind to be promoted: what it cannot have heard of yet while
/// writes go on. Counted with it, a majority must not wait for it to catch up.
pub(super) const PROMOTION_LAG_MAX: u64 = 1_000;

/// A change of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Change {
    /// A learner becomes a voter.
    Promote(u64),
    /// A member is one no longer.
    Remove(u64),
}

/// The group as its leader knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) leader: u64,
    pub(super) voters: BTreeSet<u64>,
    pub(super) learners: BTreeSet<u64>,
    /// Members that answer, the leader among them.
    pub(super) reachable: BTreeSet<u64>,
    /// Entries that each member is behind; absent when nothing is known of it.
    pub(super) lag: BTreeMap<u64, u64>,
}

/// What a change does, once it was found safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Is so already.
    Nothing,
    AddVoter(u64),
    RemoveVoter(u64),
    RemoveLearner(u64),
}

/// Whether a change is safe, and what it comes to.
pub(super) fn check(group: &Group, change: Change) -> Result<Step, Failure> {
    match change {
        Change::Promote(id) => promote(group, id),
        Change::Remove(id) => remove(group, id),
    }
}

fn promote(group: &Group, id: u64) -> Result<Step, Failure> {
    if group.voters.contains(&id) {
        return Ok(Step::Nothing);
    }
    if !group.learners.contains(&id) {
        return unknown(id);
    }
    if group.voters.len() >= VOTERS_MAX {
        return refused(format!("there are {VOTERS_MAX} voters already: remove one first"));
    }
    match group.lag.get(&id) {
        Some(&lag) if lag <= PROMOTION_LAG_MAX => Ok(Step::AddVoter(id)),
        Some(lag) => lagging(format!(
            "controller {id} is {lag} entries behind and may be {PROMOTION_LAG_MAX}: wait until it caught up"
        )),
        None => lagging(format!(
            "controller {id} has not taken anything from the leader yet: make sure that it runs, and wait"
        )),
    }
}

fn remove(group: &Group, id: u64) -> Result<Step, Failure> {
    if group.learners.contains(&id) {
        return Ok(Step::RemoveLearner(id));
    }
    if !group.voters.contains(&id) {
        return unknown(id);
    }
    if group.voters.len() == 1 {
        return refused(format!("controller {id} is the last voter: the cluster would be gone"));
    }
    if group.leader == id {
        return refused(format!(
            "controller {id} leads: let another lead first ('millrace cluster transfer')"
        ));
    }
    let left: BTreeSet<u64> = group.voters.iter().copied().filter(|&voter| voter != id).collect();
    let up = left.intersection(&group.reachable).count();
    if up <= left.len() / 2 {
        return refused(format!(
            "of the voters that would be left, only {up} of {} answer: without a majority nothing could be written any more; bring one back first",
            left.len()
        ));
    }
    Ok(Step::RemoveVoter(id))
}

/// Whether the model files in use stay safe without a member: one that stays has each, and a
/// majority of the voters that stay, where the one that goes can help to make it one. A dead one
/// cannot: its place must be free for another, who makes the copies whole again.
pub(super) fn keeps_models<'a>(
    group: &Group,
    leaving: u64,
    mut used: impl Iterator<Item = &'a Artifact>,
) -> Result<(), Failure> {
    used.try_for_each(|artifact| keeps_model(group, leaving, artifact))
}

fn keeps_model(group: &Group, leaving: u64, artifact: &Artifact) -> Result<(), Failure> {
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
            "controller {leaving} alone holds model file {digest}, and does not answer: start it and try again once another has copied the file, or delete the functions that use it ('millrace get functions')"
        ));
    }
    let missing = || voters().filter(|id| !holds(id));
    // One that answers: the others copy it when they are back.
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

/// The most members of a group. Each is in every entry of the log that changes the group.
pub(super) const MEMBERS_MAX: usize = 32;
/// The longest address of a member: a host name has 253 bytes at most.
pub(super) const ADDRESS_BYTES_MAX: usize = 260;
/// The longest name of a data directory.
pub(super) const DIRECTORY_BYTES_MAX: usize = 128;

/// A controller that wants to be a member, as its request describes the controller.
#[derive(Debug, Clone, Copy)]
pub(super) struct Announced<'a> {
    pub(super) id: u64,
    pub(super) address: &'a str,
    pub(super) directory: &'a str,
}

/// Whether a controller that announces itself may be taken for the member of its number in a group of
/// `members`. `known` is the data directory that the group knows for it.
pub(super) fn admit(announced: Announced<'_>, known: Option<&str>, members: usize) -> Result<(), Failure> {
    let Announced { id, address, directory } = announced;
    if id == 0 {
        return refused("controllers are numbered from 1: give this one another id".to_owned());
    }
    // An entry of the log that is too long to be written would end the leader.
    if address.len() > ADDRESS_BYTES_MAX {
        return refused(format!("the address has {} bytes: at most {ADDRESS_BYTES_MAX}", address.len()));
    }
    if directory.len() > DIRECTORY_BYTES_MAX {
        let len = directory.len();
        return refused(format!("the data directory's name has {len} bytes: at most {DIRECTORY_BYTES_MAX}"));
    }
    if known.is_none() && members >= MEMBERS_MAX {
        return refused(format!("the group has {members} members, the most that it may have: remove some"));
    }
    match known {
        Some(known) if known != directory => {
            let message = format!(
                "controller {id} is a member already, with another data directory: one that lost its directory may have forgotten what it voted for and what it acknowledged, and must not come back as itself; remove it ('millrace cluster remove {id}') and start this one with an id that was never used"
            );
            Err(Failure::new(Reason::PeerMismatch, message))
        }
        _ => Ok(()),
    }
}

/// What an operator should know of a group with these voters, of which these answer.
pub(super) fn warnings(voters: &BTreeSet<u64>, reachable: &BTreeSet<u64>) -> Vec<String> {
    let mut warnings = Vec::new();
    let (all, up) = (voters.len(), voters.intersection(reachable).count());
    if all > 0 && all.is_multiple_of(2) {
        warnings.push(format!(
            "{all} voters survive the loss of {}, as {} would: run 1, 3 or 5",
            (all - 1) / 2,
            all - 1
        ));
    }
    if up <= all / 2 {
        warnings.push(format!("{up} of {all} voters answer: without a majority nothing can be written"));
    } else if up < all && up == all / 2 + 1 {
        warnings.push(format!("{up} of {all} voters answer: one more lost, and nothing can be written"));
    }
    warnings
}

/// What an operator should know of where each controller shares model files (empty: nowhere), with
/// so many of them in an object store.
pub(super) fn place_warning(places: &BTreeMap<u64, &str>, shared: usize) -> Option<String> {
    let distinct: BTreeSet<&str> = places.values().copied().collect();
    if distinct.len() > 1 {
        let each = places.iter().map(|(id, place)| match *place {
            "" => format!("controller {id}: its own disk"),
            place => format!("controller {id}: {place}"),
        });
        let each: Vec<_> = each.collect();
        return Some(format!(
            "controllers keep model files in different places ({}): start all of them with the same --artifacts",
            each.join(", ")
        ));
    }
    (shared > 0 && distinct.contains("")).then(|| {
        format!(
            "{shared} model files are in an object store, and no controller that answers has one: start all of them with the --artifacts that they had"
        )
    })
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::{Caller, UnixMillis};
    use millrace_types::{Bytes, Digest};

    use super::*;

    fn group(voters: &[u64], learners: &[u64], reachable: &[u64]) -> Group {
        Group {
            leader: 1,
            voters: voters.iter().copied().collect(),
            learners: learners.iter().copied().collect(),
            reachable: reachable.iter().copied().collect(),
            lag: reachable.iter().map(|&id| (id, 0)).collect(),
        }
    }

    fn refusal(group: &Group, change: Change) -> String {
        let failure = check(group, change).unwrap_err();
        assert_eq!(failure.reason, Reason::MembershipRefused);
        failure.message
    }

    #[test]
    fn only_a_learner_that_has_the_log_is_promoted() {
        let mut three = group(&[1, 2], &[3, 4], &[1, 2, 3]);
        assert_eq!(check(&three, Change::Promote(3)), Ok(Step::AddVoter(3)));
        assert_eq!(check(&three, Change::Promote(2)), Ok(Step::Nothing));
        three.lag.insert(3, PROMOTION_LAG_MAX + 1);
        let lagging = check(&three, Change::Promote(3)).unwrap_err();
        assert!(lagging.retryable && lagging.message.contains("1001 entries behind"), "{lagging}");
        assert!(check(&three, Change::Promote(4)).unwrap_err().retryable);
        assert!(refusal(&three, Change::Promote(9)).contains("no controller 9"));
        let full = group(&[1, 2, 3, 4, 5], &[6], &[1, 2, 3, 4, 5, 6]);
        assert!(refusal(&full, Change::Promote(6)).contains("5 voters already"));
    }

    #[test]
    fn nothing_is_removed_that_the_group_cannot_do_without() {
        assert!(refusal(&group(&[1], &[], &[1]), Change::Remove(1)).contains("last voter"));
        let three = group(&[1, 2, 3], &[4], &[1, 2, 3]);
        assert!(refusal(&three, Change::Remove(1)).contains("transfer"));
        assert!(refusal(&three, Change::Remove(7)).contains("no controller 7"));
        assert_eq!(check(&three, Change::Remove(4)), Ok(Step::RemoveLearner(4)));
        assert_eq!(check(&three, Change::Remove(3)), Ok(Step::RemoveVoter(3)));
        let one_down = group(&[1, 2, 3], &[], &[1, 2]);
        assert_eq!(check(&one_down, Change::Remove(3)), Ok(Step::RemoveVoter(3)), "the dead one");
        assert!(refusal(&one_down, Change::Remove(2)).contains("only 1 of 2"), "not the one that lives");
    }

    fn model(holders: &[u64]) -> Artifact {
        Artifact {
            digest: Digest::of(b"m"),
            bytes: Bytes(1),
            model: crate::fixtures::bare_model(),
            holders: holders.iter().copied().map(ControllerId).collect(),
            uses: 1,
            touched_at: UnixMillis(1),
            created_by: Caller("test".into()),
        }
    }

    #[test]
    fn no_model_file_goes_with_a_member() {
        let check = |group: &Group, leaving, holders: &[u64], expected: Option<&str>| {
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
        // A learner counts as a copy, and not towards the majority.
        check(&three, 3, &[3, 4], Some("copied to controller 1"));
        check(&three, 4, &[3, 4], None);
        check(&three, 4, &[4], Some("copied to controller 1"));

        let dead = group(&[1, 2, 3], &[4], &[1, 2]);
        check(&dead, 3, &[1, 3], None);
        check(&dead, 3, &[3, 4], None);
        check(&dead, 4, &[1, 4], None);
        check(&dead, 3, &[3], Some("delete the functions"));
        check(&dead, 3, &[9], None);
        // The one named can make the copy.
        let five = group(&[1, 2, 3, 4, 5], &[], &[1, 3, 4, 5]);
        check(&five, 5, &[1, 4, 5], Some("copied to controller 3"));
        check(&five, 5, &[1, 3, 4, 5], None);
        check(&five, 2, &[1, 2, 4], None);

        let mixed = [model(&[1, 2, 3]), model(&[3])];
        assert!(keeps_models(&three, 3, mixed.iter()).is_err());
        assert_eq!(keeps_models(&three, 3, [].iter()), Ok(()));
    }

    #[test]
    fn a_member_with_another_directory_is_not_that_member() {
        let admit = |id, directory, known| {
            super::admit(Announced { id, address: "b:7070", directory }, known, MEMBERS_MAX - 1)
        };
        assert_eq!(admit(2, "b", None), Ok(()));
        assert_eq!(admit(2, "b", Some("b")), Ok(()));
        let wiped = admit(2, "new", Some("b")).unwrap_err();
        assert_eq!(wiped.reason, Reason::PeerMismatch);
        assert!(wiped.message.contains("millrace cluster remove 2"), "{wiped}");
        assert!(admit(0, "b", None).is_err());
    }

    #[test]
    fn a_member_that_makes_entries_of_the_log_too_long_is_refused() {
        let (address, directory) = ("a".repeat(ADDRESS_BYTES_MAX), "d".repeat(DIRECTORY_BYTES_MAX));
        let longest = Announced { id: 2, address: &address, directory: &directory };
        assert_eq!(admit(longest, None, MEMBERS_MAX - 1), Ok(()));
        assert!(admit(Announced { address: &format!("{address}a"), ..longest }, None, 1).is_err());
        assert!(admit(Announced { directory: &format!("{directory}d"), ..longest }, None, 1).is_err());
        assert!(admit(longest, None, MEMBERS_MAX).is_err());
        assert_eq!(admit(longest, Some(&directory), MEMBERS_MAX), Ok(()), "one that is a member");
    }

    #[test]
    fn warns_of_controllers_that_share_model_files_elsewhere() {
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
    fn warns_of_even_groups_and_of_majorities_that_hang_by_one() {
        let check = |voters: &[u64], reachable: &[u64], expected: &[&str]| {
            let group = group(voters, &[], reachable);
            let found = warnings(&group.voters, &group.reachable);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            assert!(found.iter().zip(expected).all(|(found, part)| found.contains(part)), "{found:?}");
        };
        check(&[1], &[1], &[]);
        check(&[1, 2, 3], &[1, 2, 3], &[]);
        check(&[1, 2], &[1, 2], &["run 1, 3 or 5"]);
        check(&[1, 2, 3], &[1, 3], &["one more lost"]);
        check(&[1, 2, 3], &[2], &["without a majority"]);
    }
}
