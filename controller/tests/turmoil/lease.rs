//! Invariant: leases.
//!
//! A controller finds a registration lost only after three things have lasted for at least a lease and
//! its grace: the leader's duties, knowledge of the registration, and silence of the node. A node that
//! did not say goodbye is declared lost in the log only by the leader of the entry's term, which found
//! the node lost itself: a deposed leader's judgement does not bind the successor.
//!
//! Not promised: that a node stays registered because another controller hears the node. Each leader
//! judges only by the messages that reach the leader itself. A stalled leader is not simulated: all
//! clocks run at the same pace.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_cluster_state::{CommandEffect, StateCommand};
use millrace_nodes::lease::{GRACE, LEASE};
use millrace_types::Epoch;

use crate::history::{FoundLost, History, Verdict};
use crate::replay;

/// The maximum delay between an event and the record: one step.
const STEP: Duration = Duration::from_millis(1);
/// The caller of commands that declare nodes lost, for silence or a goodbye.
const FLEET: &str = "fleet";

pub(crate) fn check(history: &History) -> Verdict {
    let mut since = BTreeMap::new();
    let mut declared = Vec::new();
    let mut instances = BTreeMap::new();
    replay::each(history, |index, (entry, outcomes), _| {
        for (proposal, outcome) in outcomes {
            match (&proposal.command, outcome) {
                (StateCommand::RegisterNode { instance, .. }, Ok(CommandEffect::Registered { epoch })) => {
                    since.insert(*epoch, history.applied[&index].0);
                    instances.insert(*epoch, instance.clone());
                }
                (StateCommand::NodeLost { name, epoch }, Ok(outcome))
                    if outcome.changed() && proposal.caller.0.as_ref() == FLEET =>
                {
                    declared.push((entry.log_id.leader_id.term, name.clone(), *epoch));
                }
                _ => {}
            }
        }
        Ok(())
    })?;
    for found in &history.found_lost {
        found_after_silence(history, found, &since)?;
    }
    for (term, node, epoch) in declared {
        let left = instances.get(&epoch).is_some_and(|instance| history.goodbyes.contains(instance));
        let found = history.found_lost.iter().filter(|it| it.epoch == epoch && it.node == node);
        if !left && !found.clone().any(|it| it.term == term) {
            let found: Vec<_> = found.collect();
            return Err(format!(
                "{node} of epoch {epoch} was declared lost in term {term}, whose leader did not find so: {found:?}"
            )
            .into());
        }
    }
    Ok(())
}

fn found_after_silence(history: &History, found: &FoundLost, since: &BTreeMap<Epoch, Duration>) -> Verdict {
    let FoundLost { at, controller, term, node, epoch } = found;
    let for_long = |since: Duration| since + LEASE + GRACE <= *at + STEP;
    let wrong = |why: String| Err(format!("{found:?}: {why}").into());
    match history.on_duty.get(&(*controller, *term)) {
        Some(began) if for_long(*began) => {}
        began => return wrong(format!("the controller led since {began:?}")),
    }
    match since.get(epoch) {
        Some(began) if for_long(*began) => {}
        began => return wrong(format!("the registration holds since {began:?}")),
    }
    let heard = history.heard.iter().find(|heard| {
        let meanwhile = !for_long(heard.at) && heard.at + STEP < *at;
        meanwhile && heard.controller == *controller && heard.node == *node && heard.epoch == *epoch
    });
    match heard {
        Some(heard) => wrong(format!("the node was heard {:?} before", *at - heard.at)),
        None => Ok(()),
    }
}

#[test]
fn a_node_is_lost_only_after_a_lease_of_silence_to_the_leader() {
    crate::runs::hold("lease");
}

mod planted {
    use std::time::Duration;

    use millrace_cluster_state::StateCommand;
    use millrace_types::Epoch;

    use super::check;
    use crate::history::{FoundLost, Heard, History};
    use crate::planted::{applied, commands, commands_of, init, name, registration};

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Returns a history of a node that is registered at the start and declared lost in a term.
    fn lost_in(term: u64) -> History {
        let lost = StateCommand::NodeLost { name: name("n1"), epoch: Epoch(1) };
        let entries = vec![
            commands(1, 0, vec![init()]),
            commands(1, 1, vec![registration("n1")]),
            commands_of("fleet", term, 2, vec![lost]),
        ];
        History { applied: applied(entries), ..History::default() }
    }

    fn found(at: u64, term: u64) -> FoundLost {
        FoundLost { at: millis(at), controller: 1, term, node: name("n1"), epoch: Epoch(1) }
    }

    #[test]
    fn losing_a_heard_node_or_losing_one_under_a_new_leader_is_detected() {
        let verdict = |at, led_since, heard: u64| {
            let heard = Heard { at: millis(heard), controller: 1, node: name("n1"), epoch: Epoch(1) };
            let history = History {
                found_lost: vec![found(at, 1)],
                on_duty: [((1, 1), millis(led_since))].into(),
                heard: vec![heard],
                ..lost_in(1)
            };
            check(&history).is_ok()
        };
        assert!(verdict(9_000, 10, 6_500));
        assert!(!verdict(9_000, 10, 6_600), "the node was heard 2.4 s before");
        assert!(!verdict(9_000, 7_000, 10), "the controller has led for 2 s only");
        assert!(!verdict(1_500, 0, 0), "the node has just been registered");
    }

    #[test]
    fn declaring_a_node_lost_without_finding_it_lost_is_detected() {
        let verdict = |term, goodbye: &str| {
            let history = History {
                found_lost: vec![found(9_000, 1)],
                on_duty: [((1, 1), millis(10))].into(),
                goodbyes: [goodbye.to_owned()].into(),
                ..lost_in(term)
            };
            check(&history).is_ok()
        };
        assert!(verdict(1, ""));
        assert!(!verdict(2, ""), "only the previous leader found the node lost");
        assert!(verdict(2, "a"), "the node said goodbye");
    }
}
