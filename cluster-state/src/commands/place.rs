//! Places a function's model in a node's host tier. The placement takes over the counts of removed
//! replicas, so that the required request count is not lost. A node without alphas
//! that takes over a function after the loss of a node gets the alphas of the node that was lost last.

use std::sync::Arc;

use millrace_types::{FunctionKey, NodeName, SloCounts};

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::placements::PLACEMENTS_MAX;
use crate::record::{NodeStatus, PlacementReason, PlacementRecord, SchedulingState};
use crate::state::State;

pub(crate) fn place(
    state: &mut State,
    context: CommandContext<'_>,
    function: &FunctionKey,
    name: &NodeName,
    reason: PlacementReason,
) -> CommandOutcome {
    if !state.functions.contains_key(function) {
        return Err(CommandRefusal::FunctionNotFound { key: function.clone() });
    }
    let node = state.nodes.get(name).ok_or_else(|| CommandRefusal::NodeNotFound { name: name.clone() })?;
    if node.status == NodeStatus::Lost {
        return Err(CommandRefusal::NodeIsLost { name: name.clone() });
    }
    if state.placements.get(function, name).is_some() {
        return Ok(CommandEffect::Unchanged);
    }
    if node.scheduling != SchedulingState::Schedulable {
        return Err(CommandRefusal::NodeUnschedulable { name: name.clone(), scheduling: node.scheduling });
    }
    if state.placements.len() >= PLACEMENTS_MAX {
        return Err(CommandRefusal::Full { what: "placements".into(), limit: PLACEMENTS_MAX as u64 });
    }
    claim_counts(state, function, name);
    if reason == PlacementReason::NodeLost {
        claim_alphas(state, name);
    }
    let version = state.next_version();
    state.placements.insert(Arc::new(PlacementRecord {
        function: function.clone(),
        node: name.clone(),
        reason,
        resource_version: version,
        placed_at: context.now,
        slices: Vec::new(),
    }));
    Ok(CommandEffect::Created { version })
}

/// Moves the function's unclaimed counts to the base of the new placement.
fn claim_counts(state: &mut State, function: &FunctionKey, name: &NodeName) {
    let Some(mut all) = state.scores.get(function).copied() else { return };
    let unclaimed = std::mem::take(&mut all.unclaimed);
    if unclaimed == SloCounts::default() {
        return;
    }
    state.scores.insert(function.clone(), all);
    state.change_score(name, function, |score| score.base = score.base.plus(unclaimed));
}

/// Gives the alphas of the node that was lost last to a node without alphas. A node with alphas
/// keeps its own, which follow its functions.
fn claim_alphas(state: &mut State, name: &NodeName) {
    let Some(mut node) = state.nodes.get(name).cloned() else { return };
    let reported = state.checkpoints.get(name).is_some_and(|checkpoint| !checkpoint.alphas.is_empty());
    if reported || !node.alphas.is_empty() {
        return;
    }
    let lost = state.nodes.values().filter(|node| node.status == NodeStatus::Lost);
    let Some(last) = lost.max_by_key(|node| node.resource_version) else { return };
    if !last.alphas.is_empty() {
        Arc::make_mut(&mut node).alphas = last.alphas.clone();
        state.nodes.insert(name.clone(), node);
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Alphas, Bytes, Epoch, NodeDelta, SloBase};

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{
        TestLog, alphas, counts, key, node_name, place, schedule, scored, sync_all, unplace,
    };

    fn nodes_of(log: &TestLog, function: &str) -> Vec<String> {
        log.state.placements_of(&key(function)).map(|it| it.node.to_string()).collect()
    }

    #[test]
    fn a_placement_is_idempotent_and_listed_by_function_and_by_node() {
        let mut log = TestLog::with_two_nodes();
        let version = log.state.version();
        assert_eq!(log.apply(place("f", "n1")), Ok(CommandEffect::Created { version: version + 1 }));
        assert_eq!(log.apply(place("f", "n1")), Ok(CommandEffect::Unchanged));
        log.apply(place("f", "n2")).unwrap();
        assert_eq!(nodes_of(&log, "f"), ["n1", "n2"]);
        assert_eq!(log.state.placements_on(&node_name("n1")).cloned().collect::<Vec<_>>(), [key("f")]);
        assert!(log.apply(unplace("f", "n1")).unwrap().changed());
        assert_eq!(log.apply(unplace("f", "n1")), Ok(CommandEffect::Unchanged));
        assert_eq!(nodes_of(&log, "f"), ["n2"]);
    }

    #[test]
    fn a_placement_on_an_unknown_cordoned_draining_or_lost_node_is_refused() {
        let mut log = TestLog::with_two_nodes();
        let name = node_name("n1");
        assert_eq!(log.refused(place("g", "n1")), CommandRefusal::FunctionNotFound { key: key("g") });
        assert_eq!(log.refused(place("f", "n9")), CommandRefusal::NodeNotFound { name: node_name("n9") });
        for scheduling in [SchedulingState::Cordoned, SchedulingState::Draining] {
            log.apply(schedule("n1", scheduling)).unwrap();
            let refused = log.refused(place("f", "n1"));
            assert_eq!(refused, CommandRefusal::NodeUnschedulable { name: name.clone(), scheduling });
        }
        log.apply(StateCommand::NodeLost { name: name.clone(), epoch: Epoch(1) }).unwrap();
        assert_eq!(log.refused(place("f", "n1")), CommandRefusal::NodeIsLost { name });
    }

    #[test]
    fn the_next_placement_starts_from_the_counts_of_the_lost_replica() {
        let mut log = TestLog::with_two_nodes();
        log.apply(place("f", "n1")).unwrap();
        log.apply(sync_all("n1", 1, 1, scored("f", 7, 9))).unwrap();
        log.apply(StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(1) }).unwrap();
        assert_eq!(log.state.score(&key("f")).unclaimed, counts(7, 9));
        assert_eq!(nodes_of(&log, "f"), [""; 0]);
        log.apply(place("f", "n2")).unwrap();
        assert_eq!(log.state.slo_base(&key("f"), &node_name("n2")), SloBase { m: 7, n: 9 });
        log.apply(sync_all("n2", 2, 1, scored("f", 1, 2))).unwrap();
        let score = log.state.score(&key("f"));
        assert_eq!((score.total, score.unclaimed), (counts(8, 11), counts(0, 0)));
    }

    /// T16 with T20.
    #[test]
    fn a_lost_nodes_alphas_outlive_it_and_go_to_a_node_without_any() {
        let reported = |ppm| NodeDelta { alphas: Some(alphas(ppm)), ..NodeDelta::default() };
        let lost = || StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(1) };
        let taken = |function| StateCommand::Place {
            function: key(function),
            node: node_name("n2"),
            reason: PlacementReason::NodeLost,
        };
        let of = |log: &TestLog, name| log.state.node(&node_name(name)).unwrap().alphas.clone();

        let mut log = TestLog::with_two_nodes();
        log.apply(place("f", "n1")).unwrap();
        log.apply(sync_all("n1", 1, 1, reported(250_000))).unwrap();
        assert_eq!(of(&log, "n1"), Alphas::new(), "the node itself knows its alphas");
        log.apply(lost()).unwrap();
        log.apply(taken("f")).unwrap();
        assert_eq!(of(&log, "n2"), alphas(250_000));
        log.register("n1", "b", Bytes::gib(1)).unwrap();
        assert_eq!(of(&log, "n1"), alphas(250_000));

        let mut log = TestLog::with_two_nodes();
        log.apply(sync_all("n1", 1, 1, reported(250_000))).unwrap();
        log.apply(sync_all("n2", 2, 1, reported(500_000))).unwrap();
        log.apply(lost()).unwrap();
        log.apply(taken("f")).unwrap();
        assert_eq!(of(&log, "n2"), Alphas::new(), "the node serves by an alpha of its own");
    }

    /// A worker that is lost again before its functions return has reported no alpha.
    #[test]
    fn a_registration_without_alphas_leaves_the_alphas_of_the_one_before() {
        let mut log = TestLog::with_two_nodes();
        let reported = |alphas| NodeDelta { alphas: Some(alphas), ..NodeDelta::default() };
        log.apply(sync_all("n1", 1, 1, reported(alphas(250_000)))).unwrap();
        log.apply(StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(1) }).unwrap();
        log.register("n1", "b", Bytes::gib(1)).unwrap();
        log.apply(sync_all("n1", 3, 1, reported(Alphas::new()))).unwrap();
        log.apply(StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(3) }).unwrap();
        assert_eq!(log.state.node(&node_name("n1")).unwrap().alphas, alphas(250_000));
    }

    #[test]
    fn a_moved_placement_keeps_the_score_there_and_back() {
        let mut log = TestLog::with_two_nodes();
        log.apply(place("f", "n1")).unwrap();
        log.apply(sync_all("n1", 1, 1, scored("f", 7, 9))).unwrap();
        log.apply(unplace("f", "n1")).unwrap();
        log.apply(place("f", "n2")).unwrap();
        assert_eq!(log.state.slo_base(&key("f"), &node_name("n2")), SloBase { m: 7, n: 9 });
        // The old replica finishes its running requests.
        log.apply(sync_all("n1", 1, 2, scored("f", 8, 10))).unwrap();
        log.apply(unplace("f", "n2")).unwrap();
        log.apply(place("f", "n1")).unwrap();
        let base = log.state.slo_base(&key("f"), &node_name("n1"));
        assert_eq!(base.effective(counts(8, 10)), counts(8, 10), "each request counts once");
        assert_eq!(log.state.score(&key("f")).total, counts(8, 10));
    }
}
