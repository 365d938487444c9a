//! Removes a function's placement on a node. The SLO counts of the function on the node so far go to the
//! function's next placement. Requests that still run there are added to the node's own counts.

use millrace_types::{FunctionKey, NodeName};

use crate::outcome::{CommandEffect, CommandOutcome};
use crate::state::State;

pub(crate) fn unplace(state: &mut State, function: &FunctionKey, node: &NodeName) -> CommandOutcome {
    if state.placements.remove(function, node).is_none() {
        return Ok(CommandEffect::Unchanged);
    }
    state.settle_score(function, node);
    Ok(CommandEffect::Deleted { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;

    use super::*;
    use crate::commands::testing::{TestLog, apply, counts, delete, key, place, scored, sync_all, unplace};

    #[test]
    fn removing_a_missing_placement_changes_nothing() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        assert_eq!(log.apply(unplace("f", "n1")), Ok(CommandEffect::Unchanged));
        log.apply(apply("f", "m1")).unwrap();
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        log.apply(sync_all("n1", 1, 1, scored("f", 1, 2))).unwrap();
        assert_eq!(log.apply(unplace("f", "n1")), Ok(CommandEffect::Unchanged));
        assert_eq!(log.state.score(&key("f")).unclaimed, counts(0, 0));
    }

    #[test]
    fn deleting_a_function_removes_its_placements_and_scores() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        log.apply(place("f", "n1")).unwrap();
        log.apply(sync_all("n1", 1, 1, scored("f", 1, 2))).unwrap();
        log.apply(delete("f")).unwrap();
        assert_eq!(log.state.placements().count(), 0);
        assert_eq!(log.state.score(&key("f")).total, counts(0, 0));
        log.apply(sync_all("n1", 1, 2, scored("f", 3, 3))).unwrap();
        assert_eq!(log.state.score(&key("f")).total, counts(0, 0), "the node had not heard of the deletion");
    }
}
