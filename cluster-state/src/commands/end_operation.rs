//! Records how an operation ended. A cancelled drain leaves its node cordoned. Functions that have
//! moved stay on their new nodes.

use crate::context::CommandContext;
use crate::operation_record::{OperationKind, OperationResult};
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::SchedulingState;
use crate::state::State;

pub(crate) fn end_operation(
    state: &mut State,
    context: CommandContext<'_>,
    id: u64,
    end: &OperationResult,
) -> CommandOutcome {
    let operation = state.operations.get(&id).cloned().ok_or(CommandRefusal::OperationNotFound { id })?;
    if !operation.is_running() {
        return Ok(CommandEffect::Unchanged);
    }
    match (&operation.kind, end) {
        (OperationKind::DrainNode { node }, OperationResult::Cancelled) => {
            let version = state.next_version();
            state.nodes.change(node, |node| {
                node.scheduling = SchedulingState::Cordoned;
                node.resource_version = version;
                node.changed_at = context.now;
            });
            state.end_operation(id, context.now, OperationResult::Cancelled);
            Ok(CommandEffect::Changed { version })
        }
        (OperationKind::DrainNode { .. }, OperationResult::Succeeded | OperationResult::Failed { .. })
        | (
            OperationKind::PromoteController { .. } | OperationKind::RemoveController { .. },
            OperationResult::Cancelled,
        ) => Err(CommandRefusal::OperationGoesOn { id }),
        (_, end) => {
            let version = state.next_version();
            state.end_operation(id, context.now, end.clone());
            Ok(CommandEffect::Changed { version })
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Bytes, Epoch};

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, apply, node_name, place, schedule, unplace};
    use crate::operations::{OPERATION_LIFE_MAX, OPERATION_TTL, OPERATIONS_MAX};
    use crate::record::ControllerId;

    /// Returns a log with two functions on `n1`, which is draining, and the id of the drain.
    fn draining() -> (TestLog, u64) {
        let mut log = TestLog::with_artifacts(&["m"]);
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        for function in ["f", "g"] {
            log.apply(apply(function, "m")).unwrap();
            log.apply(place(function, "n1")).unwrap();
        }
        log.apply(schedule("n1", SchedulingState::Draining)).unwrap();
        let id = log.state.drain_of(&node_name("n1")).unwrap().id;
        (log, id)
    }

    fn stands(log: &TestLog, id: u64) -> (u64, u64, Option<OperationResult>) {
        let operation = log.state.operation(id).unwrap();
        let end = operation.ended.as_ref().map(|(_, end)| end.clone());
        (log.state.steps_done(operation), operation.total, end)
    }

    fn cancel(id: u64) -> StateCommand {
        StateCommand::EndOperation { id, end: OperationResult::Cancelled }
    }

    #[test]
    fn a_drain_ends_when_no_function_is_left_on_the_node() {
        let (mut log, id) = draining();
        assert_eq!(stands(&log, id), (0, 2, None));
        log.apply(unplace("f", "n1")).unwrap();
        assert_eq!(stands(&log, id), (1, 2, None));
        log.tick(5);
        log.apply(unplace("g", "n1")).unwrap();
        assert_eq!(stands(&log, id), (2, 2, Some(OperationResult::Succeeded)));
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
        assert_eq!(log.apply(cancel(id)), Ok(CommandEffect::Unchanged), "the drain has ended");
        log.apply(schedule("n1", SchedulingState::Schedulable)).unwrap();
        assert_eq!(stands(&log, id), (2, 2, Some(OperationResult::Succeeded)), "the end does not change");
    }

    #[test]
    fn the_drain_of_an_empty_or_lost_node_succeeds() {
        let mut log = TestLog::new();
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        log.apply(schedule("n1", SchedulingState::Draining)).unwrap();
        let ended: Vec<_> = log.state.operations().map(|it| it.is_running()).collect();
        assert_eq!(ended, [false]);
        let (mut log, id) = draining();
        log.apply(StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(1) }).unwrap();
        assert_eq!(stands(&log, id).2, Some(OperationResult::Succeeded));
    }

    #[test]
    fn a_cancelled_drain_leaves_the_node_cordoned() {
        let (mut log, id) = draining();
        log.apply(unplace("f", "n1")).unwrap();
        assert!(log.apply(cancel(id)).unwrap().changed());
        assert_eq!(log.state.node(&node_name("n1")).unwrap().scheduling, SchedulingState::Cordoned);
        assert_eq!(stands(&log, id), (1, 2, Some(OperationResult::Cancelled)));
        log.apply(unplace("g", "n1")).unwrap();
        assert_eq!(stands(&log, id), (1, 2, Some(OperationResult::Cancelled)), "the end does not change");
        let (mut log, id) = draining();
        log.apply(schedule("n1", SchedulingState::Schedulable)).unwrap();
        assert_eq!(stands(&log, id).2, Some(OperationResult::Cancelled), "uncordoned");
        assert_eq!(log.refused(cancel(999)), CommandRefusal::OperationNotFound { id: 999 });
    }

    #[test]
    fn a_change_of_the_group_cannot_be_cancelled() {
        let mut log = TestLog::new();
        let kind = OperationKind::RemoveController { id: ControllerId(3) };
        let Ok(CommandEffect::Created { version: id }) = log.apply(StateCommand::BeginOperation { kind })
        else {
            panic!("the operation begins");
        };
        assert_eq!(log.refused(cancel(id)), CommandRefusal::OperationGoesOn { id });
        let end = OperationResult::Failed { why: "no".into() };
        assert!(log.apply(StateCommand::EndOperation { id, end: end.clone() }).is_ok());
        assert_eq!(stands(&log, id), (0, 0, Some(end)));
        let (mut log, id) = draining();
        let ended = StateCommand::EndOperation { id, end: OperationResult::Succeeded };
        assert_eq!(log.refused(ended), CommandRefusal::OperationGoesOn { id }, "the node is not empty yet");
    }

    #[test]
    fn unfinished_drains_do_not_count_as_changes_of_the_group() {
        let mut log = TestLog::with_artifacts(&["m"]);
        log.apply(apply("f", "m")).unwrap();
        let nodes = OPERATIONS_MAX + 1;
        for number in 0..nodes {
            let node = format!("n{number}");
            log.register(&node, "a", Bytes::gib(1)).unwrap();
            log.apply(place("f", &node)).unwrap();
            log.apply(schedule(&node, SchedulingState::Draining)).unwrap();
        }
        let begin = || StateCommand::BeginOperation {
            kind: OperationKind::PromoteController { id: ControllerId(2) },
        };
        for _ in 0..OPERATIONS_MAX {
            log.apply(begin()).unwrap();
        }
        let limit = OPERATIONS_MAX as u64;
        assert_eq!(log.refused(begin()), CommandRefusal::ChangesUnderWay { limit });
        assert_eq!(log.state.operations().filter(|it| it.is_running()).count(), nodes + OPERATIONS_MAX);
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
    }

    #[test]
    fn ended_operations_are_forgotten_after_a_day_or_beyond_the_bound() {
        let begin = || StateCommand::BeginOperation {
            kind: OperationKind::PromoteController { id: ControllerId(2) },
        };
        let mut log = TestLog::new();
        let first = log.state.version() + 1;
        for _ in 0..OPERATIONS_MAX {
            log.apply(begin()).unwrap();
            log.apply(StateCommand::EndOperation {
                id: log.state.version(),
                end: OperationResult::Succeeded,
            })
            .unwrap();
        }
        assert!(log.state.operation(first).is_some());
        log.apply(begin()).unwrap();
        assert!(log.state.operation(first).is_some(), "a running operation does not count");
        log.apply(StateCommand::EndOperation { id: log.state.version(), end: OperationResult::Succeeded })
            .unwrap();
        assert!(log.state.operation(first).is_none(), "the operation that ended first is forgotten");
        assert_eq!(log.state.operations().count(), OPERATIONS_MAX);
        let mut log = TestLog::new();
        log.apply(begin()).unwrap();
        log.apply(StateCommand::EndOperation { id: log.state.version(), end: OperationResult::Succeeded })
            .unwrap();
        log.tick(OPERATION_TTL.as_millis() as u64);
        log.apply(begin()).unwrap();
        assert_eq!(log.state.operations().count(), 1);
        let id = log.state.version();
        log.tick(OPERATION_LIFE_MAX.as_millis() as u64);
        log.apply(begin()).unwrap();
        assert!(
            matches!(stands(&log, id).2, Some(OperationResult::Failed { .. })),
            "the controller that began it is gone"
        );
    }
}
