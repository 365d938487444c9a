//! Invariant: epoch fencing. A command with an ended epoch of a node changes nothing, at any time of
//! arrival and through any controller. No epoch is given twice.
//!
//! Three checks cover this: the answers to proposals, the hellos on the workers' streams, and the log,
//! with each command applied again.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::{CommandEffect, NodeStatus, Proposal, State, StateCommand};
use millrace_types::{Epoch, NodeName};
use openraft::EntryPayload;

use crate::history::{Call, History, NodeAnswer, Registered, Verdict};

pub(crate) fn check(history: &History) -> Verdict {
    answers(&history.nodes)?;
    streams(&history.registered)?;
    replay(history)
}

/// Checks the workers' streams: an epoch belongs to one process.
fn streams(registered: &BTreeSet<Registered>) -> Verdict {
    // The set is ordered by epoch first.
    let one = registered.iter();
    let next = registered.iter().skip(1);
    match one.zip(next).find(|(one, next)| one.epoch == next.epoch) {
        Some((one, next)) => Err(format!("one epoch for two: {one:?} and {next:?}").into()),
        None => Ok(()),
    }
}

/// Returns the registration that a command refers to.
fn speaks_for(command: &StateCommand) -> Option<(&NodeName, Epoch)> {
    match command {
        StateCommand::SyncNode { node, batch } => Some((node, batch.epoch)),
        StateCommand::NodeLost { name, epoch } => Some((name, *epoch)),
        _ => None,
    }
}

/// Checks the answers to proposals.
fn answers(calls: &[Call<StateCommand, NodeAnswer>]) -> Verdict {
    let mut given: BTreeMap<Epoch, (&NodeName, u64)> = BTreeMap::new();
    for Call { asked, ended, .. } in calls {
        if let (StateCommand::RegisterNode { name, .. }, Some((at, NodeAnswer::Applied(applied)))) =
            (asked, ended)
            && let CommandEffect::Registered { epoch } = *applied
            && given.insert(epoch, (name, *at)).is_some()
        {
            return Err(format!("epoch {epoch} was given twice").into());
        }
    }
    for Call { asked, began, ended } in calls {
        let Some((node, epoch)) = speaks_for(asked) else { continue };
        let newer = given.iter().find(|&(&newer, &(name, at))| newer > epoch && name == node && at < *began);
        if let (Some((newer, _)), Some((_, NodeAnswer::Applied(applied)))) = (newer, ended)
            && applied.changed()
        {
            return Err(format!(
                "{asked:?} was proposed after node {node} was given epoch {newer}, and answered {applied:?}"
            )
            .into());
        }
    }
    Ok(())
}

/// Checks the log.
fn replay(history: &History) -> Verdict {
    let mut state = State::default();
    let mut given = Epoch(0);
    for (_, entry) in history.applied.values() {
        let EntryPayload::Normal(proposals) = &entry.payload else { continue };
        for proposal in proposals {
            let over = speaks_for(&proposal.command).is_some_and(|(node, epoch)| {
                !state.node(node).is_some_and(|it| it.epoch == epoch && it.status == NodeStatus::Live)
            });
            let without = over.then(|| state.clone());
            let outcome = state.apply(entry.log_id.index, proposal);
            if let Ok(CommandEffect::Registered { epoch }) = outcome
                && std::mem::replace(&mut given, epoch) >= epoch
            {
                return Err(format!("entry {}: epoch {epoch} is not above those before", entry.log_id).into());
            }
            let Some(mut without) = without else { continue };
            // Every command advances the time of the state, so compare with a command that changes only
            // the time.
            let nothing = StateCommand::NodeLost { name: nobody(), epoch: Epoch(0) };
            let refused =
                without.apply(entry.log_id.index, &Proposal { command: nothing, ..proposal.clone() });
            assert!(!refused.is_ok_and(CommandEffect::changed), "the node does not exist");
            if state != without {
                return Err(format!(
                    "entry {}: {:?} is of an epoch that is over, and changed the state ({outcome:?})",
                    entry.log_id, proposal.command
                )
                .into());
            }
        }
    }
    Ok(())
}

fn nobody() -> NodeName {
    NodeName::new("nobody").expect("a name")
}

#[test]
fn a_command_with_an_ended_epoch_changes_nothing() {
    crate::runs::hold("epoch fencing");
}

mod planted {
    use super::{Call, CommandEffect, Epoch, NodeAnswer, Registered, StateCommand, answers, streams};
    use crate::planted::{name, registration};

    fn call(asked: StateCommand, began: u64, answer: CommandEffect) -> Call<StateCommand, NodeAnswer> {
        Call { asked, began, ended: Some((began + 1, NodeAnswer::Applied(answer))) }
    }

    fn registered(node: &str, began: u64, epoch: u64) -> Call<StateCommand, NodeAnswer> {
        call(registration(node), began, CommandEffect::Registered { epoch: Epoch(epoch) })
    }

    fn lost(began: u64, epoch: u64, answer: CommandEffect) -> Call<StateCommand, NodeAnswer> {
        call(StateCommand::NodeLost { name: name("n1"), epoch: Epoch(epoch) }, began, answer)
    }

    #[test]
    fn an_epoch_given_twice_is_detected() {
        assert!(answers(&[registered("n1", 1, 1), registered("n2", 3, 2)]).is_ok());
        assert!(answers(&[registered("n1", 1, 1), registered("n2", 3, 1)]).is_err());
    }

    #[test]
    fn a_change_with_an_old_epoch_is_detected() {
        let first = registered("n1", 1, 1);
        let second = registered("n1", 10, 2);
        let fenced = |late| answers(&[first.clone(), second.clone(), late]).is_ok();
        let changed = CommandEffect::Changed { version: 9 };
        assert!(fenced(lost(5, 1, changed)), "while the epoch was in force");
        assert!(fenced(lost(20, 2, changed)), "the epoch is in force");
        assert!(fenced(lost(20, 1, CommandEffect::Unchanged)));
        assert!(!fenced(lost(20, 1, changed)));
    }

    #[test]
    fn an_epoch_shared_by_two_processes_is_detected() {
        let told = |registered: &[(&str, &str, u64)]| {
            let registered = registered.iter().map(|&(node, instance, epoch)| Registered {
                epoch: Epoch(epoch),
                node: name(node),
                instance: instance.to_owned(),
            });
            streams(&registered.collect()).is_ok()
        };
        assert!(told(&[("n1", "a", 1), ("n1", "a", 1), ("n1", "a", 3), ("n2", "b", 2)]));
        assert!(!told(&[("n1", "a", 1), ("n1", "b", 1)]));
    }
}
