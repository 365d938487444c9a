//! Sets whether a node accepts functions: cordon, drain and uncordon. The operator's setting
//! outlives the node's registration. A drain is an operation ([`crate::operations`]).

use std::sync::Arc;

use millrace_types::NodeName;

use crate::context::CommandContext;
use crate::operation_record::OperationKind;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::SchedulingState;
use crate::state::State;

pub(crate) fn set_node_scheduling(
    state: &mut State,
    context: CommandContext<'_>,
    name: &NodeName,
    scheduling: SchedulingState,
) -> CommandOutcome {
    let Some(mut node) = state.nodes.get(name).cloned() else {
        return Err(CommandRefusal::NodeNotFound { name: name.clone() });
    };
    let same = node.scheduling == scheduling;
    if same && !is_draining_without_operation(state, name, scheduling) {
        return Ok(CommandEffect::Unchanged);
    }
    let version = state.next_version();
    if !same {
        let changed = Arc::make_mut(&mut node);
        changed.scheduling = scheduling;
        changed.resource_version = version;
        changed.changed_at = context.now;
        state.nodes.insert(name.clone(), node);
    }
    if scheduling == SchedulingState::Draining {
        state.begin_operation(context, OperationKind::DrainNode { node: name.clone() });
    }
    Ok(CommandEffect::Changed { version })
}

/// Whether a node is draining without an operation, because its drain began under a format without
/// operations.
fn is_draining_without_operation(state: &State, name: &NodeName, scheduling: SchedulingState) -> bool {
    scheduling == SchedulingState::Draining
        && state.placements.on(name).next().is_some()
        && state.drain_of(name).is_none()
}

#[cfg(test)]
mod tests {
    use millrace_types::{Bytes, Epoch};

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, apply, node_name, place, schedule, unplace};
    use crate::table::CountedTable;

    #[test]
    fn a_scheduling_state_outlives_the_loss_and_return_of_the_node() {
        let mut log = TestLog::new();
        let name = node_name("n1");
        let unknown = CommandRefusal::NodeNotFound { name: name.clone() };
        assert_eq!(log.refused(schedule("n1", SchedulingState::Cordoned)), unknown);
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        assert_eq!(log.apply(schedule("n1", SchedulingState::Schedulable)), Ok(CommandEffect::Unchanged));
        assert!(log.apply(schedule("n1", SchedulingState::Draining)).unwrap().changed());
        log.apply(StateCommand::NodeLost { name: name.clone(), epoch: Epoch(1) }).unwrap();
        assert!(log.apply(schedule("n1", SchedulingState::Cordoned)).unwrap().changed(), "lost or not");
        log.register("n1", "b", Bytes::gib(1)).unwrap();
        let node = log.state.node(&name).unwrap();
        assert_eq!((node.scheduling, node.takes_functions()), (SchedulingState::Cordoned, false));
    }

    #[test]
    fn a_repeated_drain_begins_an_operation_if_the_first_began_in_an_older_format() {
        let mut log = TestLog::with_artifacts(&["m"]);
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        log.apply(apply("f", "m")).unwrap();
        log.apply(place("f", "n1")).unwrap();
        log.apply(schedule("n1", SchedulingState::Draining)).unwrap();
        // A state that was written in a format without operations is read like this.
        log.state.operations = CountedTable::default();
        let before = log.state.node(&node_name("n1")).unwrap().clone();
        assert!(log.apply(schedule("n1", SchedulingState::Draining)).unwrap().changed());
        assert_eq!(log.state.node(&node_name("n1")), Some(&before), "the node does not change");
        assert!(log.state.drain_of(&node_name("n1")).is_some());
        assert_eq!(log.apply(schedule("n1", SchedulingState::Draining)), Ok(CommandEffect::Unchanged));
        log.apply(unplace("f", "n1")).unwrap();
        assert_eq!(
            log.apply(schedule("n1", SchedulingState::Draining)),
            Ok(CommandEffect::Unchanged),
            "the node is empty"
        );
    }
}
