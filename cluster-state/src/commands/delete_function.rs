//! Removes a function that no workflow runs, with all its revisions, placements and scores. The
//! state remembers the last revision number, and the usage stays billed.

use millrace_types::FunctionKey;

use super::{check_expected, check_unused, count_use, retire};
use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::state::{RetiredName, State};
use crate::workflows::function_run;

pub(crate) fn delete_function(
    state: &mut State,
    context: CommandContext<'_>,
    key: &FunctionKey,
    expected: Option<u64>,
) -> CommandOutcome {
    let Some(function) = state.functions.get(key) else {
        return Err(CommandRefusal::FunctionNotFound { key: key.clone() });
    };
    check_expected(key, expected, Some(function.resource_version))?;
    check_unused(state, key, &function_run(key))?;

    state.drop_placements_and_scores(key);
    let version = state.next_version();
    if let Some(function) = state.functions.remove(key) {
        for revision in &function.revisions {
            count_use(state, revision.digest, context.now, |uses| uses - 1);
        }
        retire(state, key, RetiredName { last: function.generation(), version });
    }
    Ok(CommandEffect::Deleted { version })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, apply, delete, digest, key};

    #[test]
    fn a_deleted_function_releases_its_artifacts() {
        let mut log = TestLog::with_artifacts(&["m1", "m2"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(apply("f", "m2")).unwrap();
        let version = log.state.version();
        assert_eq!(log.apply(delete("f")), Ok(CommandEffect::Deleted { version: version + 1 }));
        assert!(log.state.function(&key("f")).is_none());
        assert_eq!(log.state.artifacts().map(|it| it.uses).collect::<Vec<_>>(), vec![0, 0]);
        assert!(log.state.artifact(&digest("m1")).is_some());
    }

    #[test]
    fn deleting_an_unknown_function_or_a_stale_version_is_refused() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        assert_eq!(log.refused(delete("f")), CommandRefusal::FunctionNotFound { key: key("f") });
        log.apply(apply("f", "m1")).unwrap();
        let actual = log.state.version();
        let stale = StateCommand::DeleteFunction { key: key("f"), expected: Some(actual + 1) };
        assert_eq!(
            log.refused(stale),
            CommandRefusal::Conflict { key: key("f"), expected: actual + 1, actual }
        );
    }
}
