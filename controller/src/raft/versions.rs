//! The leader switches the cluster to newer rules after all voters know the newer rules.
//!
//! Controllers are upgraded one process at a time, and each build knows its own and the previous rules
//! ([`KnownRules`]). While builds are mixed, the older rules stay in force. The switch is a log entry,
//! so all controllers switch at the same entry. A build that does not know the newer rules refuses to
//! continue past that entry.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_cluster_state::{CallerName, KnownRules, RulesVersion, StateCommand};
use millrace_types::{Failure, Reason};
use tokio_util::sync::CancellationToken;

use super::replica::Replica;

/// The interval between checks whether all voters know newer rules, while this build does.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Returns the version to switch to: the next version, if every voter reports a build that knows that
/// version, and no other member reports an older build. `said` has the newest version of each member
/// that answered.
fn next_rules(
    in_force: RulesVersion,
    voters: &BTreeSet<u64>,
    said: &BTreeMap<u64, RulesVersion>,
) -> Option<RulesVersion> {
    let next = in_force.next();
    let all_answered = voters.iter().all(|voter| said.contains_key(voter));
    (all_answered && said.values().all(|&newest| newest >= next)).then_some(next)
}

/// Refuses a controller whose build would halt at the rules in force.
pub(super) fn check_knows(controller: u64, known: KnownRules, in_force: RulesVersion) -> Result<(), Failure> {
    if known.check(in_force).is_ok() {
        return Ok(());
    }
    let message = format!(
        "the cluster has version {in_force}, and the build of controller {controller} knows only {} and {}: start that controller with a build that knows version {in_force}",
        known.oldest(),
        known.newest()
    );
    Err(Failure::new(Reason::PeerMismatch, message))
}

/// Switches the rules when possible while this controller leads, until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // The result is `None` after a stop.
    stop.run_until_cancelled(run(replica)).await;
}

async fn run(replica: Replica) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(term) = replica.leading_term() else { continue };
        let (in_force, is_named) = {
            let latest = replica.reader.latest();
            (latest.state.rules(), latest.state.cluster().is_some())
        };
        if !is_named || in_force >= RulesVersion::NEWEST {
            continue;
        }
        let said = replica.statuses().await.into_iter();
        let said = said.filter_map(|(id, status)| Some((id, status.ok()?.newest_rules))).collect();
        let voters = replica.membership().voter_ids().collect();
        let Some(version) = next_rules(in_force, &voters, &said) else { continue };
        let switch = StateCommand::SetClusterVersion { version };
        match replica.propose_leading(term, CallerName("controller".into()), switch).await {
            Ok(_) => {
                tracing::info!(%version, "the cluster switched to newer rules, which every controller knows")
            }
            Err(failure) => {
                tracing::debug!(error = failure.message, "cannot switch the cluster to newer rules yet")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_switches_when_all_voters_and_all_answering_members_know_the_next_version() {
        let check = |said: &[(u64, u64)]| {
            let said = said.iter().map(|&(id, newest)| (id, RulesVersion(newest))).collect();
            next_rules(RulesVersion(9), &[1, 2, 3].into(), &said).map(|version| version.0)
        };
        assert_eq!(check(&[(1, 10), (2, 10), (3, 10)]), Some(10));
        assert_eq!(check(&[(1, 10), (2, 10), (3, 11)]), Some(10), "one version at a time");
        assert_eq!(check(&[(1, 10), (2, 10), (3, 9)]), None);
        assert_eq!(check(&[(1, 10), (2, 10)]), None, "a voter does not answer");
        assert_eq!(check(&[(1, 10), (2, 10), (3, 10), (4, 9)]), None, "a learner would halt");
        assert_eq!(check(&[(1, 10), (2, 10), (3, 10), (4, 10)]), Some(10));
    }

    #[test]
    fn a_controller_that_does_not_know_the_rules_in_force_is_refused() {
        let check = |newest| check_knows(2, KnownRules::up_to(RulesVersion(newest)), RulesVersion(10));
        assert!(check(10).is_ok() && check(11).is_ok());
        let refused = check(9).unwrap_err();
        assert_eq!(refused.reason, Reason::PeerMismatch);
        assert!(refused.message.ends_with("start that controller with a build that knows version 10"));
        assert!(check(12).is_err());
    }
}
