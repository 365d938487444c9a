//! Sets all slices of a node's GPUs. A slice belongs to the placement of its function, and ends with it.
//!
//! Whether a GPU can give all its slices their requested time (`quotaRequest`) is not checked here. The leader
//! checks it before it proposes, because that rule may change between builds, and every build must apply a
//! command alike.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::limits::{SLICES_PER_GPU_MAX, SLICES_PER_NODE_MAX};
use millrace_types::{FunctionKey, GpuIndex, NodeName, SliceId};

use crate::command::{NodeSlice, StateCommand};
use crate::operation_record::OperationKind;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::{NodeStatus, SliceRecord};
use crate::state::State;

/// Refuses a command with slices or profiles under rules without them: a controller of an older build would ignore
/// the slices of a spec, and could not read the other commands.
pub(crate) fn check_rules(state: &State, command: &StateCommand) -> Result<(), CommandRefusal> {
    if state.rules().has_slices() {
        return Ok(());
    }
    let problem = || "slices need cluster version 10: upgrade all controllers first".to_owned();
    match command {
        StateCommand::ApplyFunction { spec, .. } if spec.slices.is_some() => {
            Err(CommandRefusal::InvalidSpec { problem: problem() })
        }
        StateCommand::SetSlices { node, .. } => {
            Err(CommandRefusal::SlicesRefused { node: node.clone(), problem: problem() })
        }
        StateCommand::RecordTrial { .. }
        | StateCommand::BeginOperation { kind: OperationKind::ProfileFunction { .. } } => {
            let problem = "profiles need cluster version 10: upgrade all controllers first".to_owned();
            Err(CommandRefusal::InvalidSpec { problem })
        }
        _ => Ok(()),
    }
}

pub(crate) fn set_slices(state: &mut State, node: &NodeName, slices: &[NodeSlice]) -> CommandOutcome {
    let refused = |problem: String| Err(CommandRefusal::SlicesRefused { node: node.clone(), problem });
    let record = state.nodes.get(node).ok_or_else(|| CommandRefusal::NodeNotFound { name: node.clone() })?;
    if record.status == NodeStatus::Lost {
        return Err(CommandRefusal::NodeIsLost { name: node.clone() });
    }
    if slices.len() > SLICES_PER_NODE_MAX {
        let count = slices.len();
        return refused(format!(
            "{count} are more than SLICES_PER_NODE_MAX = {SLICES_PER_NODE_MAX}: use more nodes"
        ));
    }
    let mut wanted: BTreeMap<&FunctionKey, Vec<SliceRecord>> = BTreeMap::new();
    let mut owners: BTreeMap<SliceId, &FunctionKey> = BTreeMap::new();
    let mut counts: BTreeMap<GpuIndex, usize> = BTreeMap::new();
    for NodeSlice { function, slice } in slices {
        if !record.gpus.iter().any(|gpu| gpu.index == slice.gpu) {
            return refused(format!("the node has no {}: choose one of its GPUs", slice.gpu));
        }
        let Some(placement) = state.placements.get(function, node) else {
            return refused(format!("{function} is not placed there: place the function first"));
        };
        let has = placement.slices.iter().any(|had| had.id == slice.id);
        if !has && slice.id.0 <= state.slices_given {
            return refused(format!("slice {} was given before: take a new number", slice.id));
        }
        if owners.insert(slice.id, function).is_some() {
            return refused(format!("slice {} is named twice: name each slice once", slice.id));
        }
        let count = counts.entry(slice.gpu).or_default();
        *count += 1;
        if *count > SLICES_PER_GPU_MAX {
            return refused(format!(
                "{} has more than SLICES_PER_GPU_MAX = {SLICES_PER_GPU_MAX} slices: move some to other GPUs",
                slice.gpu
            ));
        }
        wanted.entry(function).or_default().push(*slice);
    }
    wanted.values_mut().for_each(|slices| slices.sort_unstable_by_key(|slice| slice.id));
    let placed: Vec<_> = state.placements.on(node).cloned().collect();
    let mut effect = CommandEffect::Unchanged;
    for function in placed {
        let Some(mut placement) = state.placements.get(&function, node).cloned() else { continue };
        let slices = wanted.remove(&function).unwrap_or_default();
        if placement.slices == slices {
            continue;
        }
        let version = state.next_version();
        let changed = Arc::make_mut(&mut placement);
        changed.slices = slices;
        changed.resource_version = version;
        state.placements.insert(placement);
        effect = CommandEffect::Changed { version };
    }
    let highest = owners.last_key_value().map_or(0, |(id, _)| id.0);
    state.slices_given = state.slices_given.max(highest);
    Ok(effect)
}

#[cfg(test)]
mod tests {
    use millrace_types::limits::COMMAND_BYTES_MAX;
    use millrace_types::{AskedSlices, Bytes, Permille, Terms};

    use super::*;
    use crate::commands::testing::{TestLog, delete, key, node_name, place, unplace};
    use crate::rules::RulesVersion;

    fn slice(function: &str, id: u64, gpu: u32) -> NodeSlice {
        let share = |thousandths| Permille::new(thousandths).unwrap();
        let terms = Terms::new(share(120), share(120), share(300), share(800)).unwrap();
        NodeSlice {
            function: key(function),
            slice: SliceRecord { id: SliceId(id), gpu: GpuIndex(gpu), terms },
        }
    }

    fn set(node: &str, slices: &[NodeSlice]) -> StateCommand {
        StateCommand::SetSlices { node: node_name(node), slices: slices.to_vec() }
    }

    /// Returns the slices on a node, each as function and id.
    fn on(log: &TestLog, node: &str) -> Vec<(String, u64)> {
        let node = node_name(node);
        log.state.slices_on(&node).map(|(function, slice)| (function.name.to_string(), slice.id.0)).collect()
    }

    fn problem(log: &mut TestLog, command: StateCommand) -> String {
        log.refused(command).to_string()
    }

    /// Returns the log of a cluster in which f is on both nodes and g on the first.
    fn placed() -> TestLog {
        let mut log = TestLog::with_two_nodes();
        log.apply(crate::commands::testing::apply("g", "m1")).unwrap();
        for (function, node) in [("f", "n1"), ("f", "n2"), ("g", "n1")] {
            log.apply(place(function, node)).unwrap();
        }
        log
    }

    #[test]
    fn a_command_has_all_slices_of_a_node_and_leaves_other_nodes_alone() {
        let mut log = placed();
        assert!(log.apply(set("n1", &[slice("g", 2, 0), slice("f", 1, 0)])).unwrap().changed());
        assert!(log.apply(set("n2", &[slice("f", 3, 0)])).unwrap().changed());
        assert_eq!(on(&log, "n1"), [("f".into(), 1), ("g".into(), 2)]);
        let again = set("n1", &[slice("f", 1, 0), slice("g", 2, 0)]);
        assert_eq!(log.apply(again), Ok(CommandEffect::Unchanged), "the order does not matter");
        assert!(log.apply(set("n1", &[slice("g", 2, 0)])).unwrap().changed());
        assert_eq!((on(&log, "n1"), on(&log, "n2")), (vec![("g".into(), 2)], vec![("f".into(), 3)]));
    }

    #[test]
    fn a_number_never_means_two_slices() {
        let mut log = placed();
        log.apply(set("n1", &[slice("f", 5, 0)])).unwrap();
        log.apply(set("n1", &[])).unwrap();
        assert!(problem(&mut log, set("n1", &[slice("f", 5, 0)])).contains("take a new number"));
        assert!(problem(&mut log, set("n1", &[slice("f", 4, 0)])).contains("take a new number"));
        log.apply(set("n1", &[slice("f", 6, 0)])).unwrap();
        assert!(problem(&mut log, set("n2", &[slice("f", 6, 0)])).contains("take a new number"));
        let twice = set("n1", &[slice("f", 6, 0), slice("g", 7, 0), slice("f", 7, 0)]);
        assert!(problem(&mut log, twice).contains("name each slice once"));
        assert_eq!(on(&log, "n1"), [("f".into(), 6)], "a refusal changes nothing");
    }

    #[test]
    fn slices_end_with_the_placement_of_their_function() {
        let mut log = placed();
        log.apply(set("n1", &[slice("f", 1, 0), slice("g", 2, 0)])).unwrap();
        log.apply(set("n2", &[slice("f", 3, 0)])).unwrap();
        log.apply(unplace("f", "n1")).unwrap();
        assert_eq!(on(&log, "n1"), [("g".into(), 2)]);
        log.apply(delete("g")).unwrap();
        assert_eq!(on(&log, "n1"), []);
        let epoch = log.state.node(&node_name("n2")).unwrap().epoch;
        log.apply(StateCommand::NodeLost { name: node_name("n2"), epoch }).unwrap();
        assert_eq!(on(&log, "n2"), []);
        log.register("n2", "again", Bytes::gib(1)).unwrap();
        log.apply(place("f", "n2")).unwrap();
        assert_eq!(on(&log, "n2"), []);
        assert_eq!(log.state.slices_given(), SliceId(3));
    }

    #[test]
    fn the_slices_of_a_node_fit_a_single_change() {
        let long = "x".repeat(63);
        let mut largest = slice(&long, u64::MAX, u32::MAX);
        largest.function.tenant = long.parse().unwrap();
        let command = set(&long, &vec![largest; SLICES_PER_NODE_MAX]);
        assert!(command.encoded_len() < COMMAND_BYTES_MAX as u64 * 9 / 10, "{}", command.encoded_len());
    }

    #[test]
    fn slices_that_cannot_be_are_refused_with_the_next_step() {
        let mut log = placed();
        assert!(problem(&mut log, set("n3", &[])).contains("get nodes"));
        assert!(problem(&mut log, set("n2", &[slice("g", 1, 0)])).contains("place the function first"));
        assert!(problem(&mut log, set("n1", &[slice("f", 1, 9)])).contains("choose one of its GPUs"));
        let many: Vec<_> = (1..=16).map(|id| slice("f", id, 0)).collect();
        assert!(problem(&mut log, set("n1", &many)).contains("move some to other GPUs"));
        assert!(log.apply(set("n1", &many[..15])).unwrap().changed());
        let many: Vec<_> = (1..=401).map(|id| slice("f", id, 0)).collect();
        assert!(problem(&mut log, set("n1", &many)).contains("use more nodes"));
    }

    /// A build of rules 9 must not find such a command in its log.
    #[test]
    fn slices_are_refused_under_rules_without_them_before_they_reach_the_log() {
        let mut log = placed();
        log.state.rules = RulesVersion(9);
        let mut spec = crate::commands::testing::spec("f");
        spec.slices = Some(AskedSlices::fixed(slice("f", 1, 0).slice.terms, 1));
        let digest = log.state.function(&key("f")).unwrap().latest().digest;
        let applied = StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() };
        for command in [applied, set("n1", &[])] {
            let refused = log.state.admit(&log.proposal(command.clone())).unwrap_err();
            assert!(refused.to_string().contains("upgrade all controllers"), "{refused}");
            assert_eq!(log.refused(command), refused);
        }
    }
}
