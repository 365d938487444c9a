//! Removes a function with all its revisions, placements and scores, and remembers where its
//! revisions' numbers stopped. What it used stays billed.

use millrace_types::FunctionKey;

use super::{check_expected, count_use};
use crate::outcome::{Applied, Outcome, Refusal};
use crate::state::{Context, RETIRED_MAX, Retired, State};

pub(crate) fn delete_function(
    state: &mut State,
    context: Context<'_>,
    key: &FunctionKey,
    expected: Option<u64>,
) -> Outcome {
    if !state.functions.contains_key(key) {
        return Err(Refusal::FunctionNotFound { key: key.clone() });
    }
    check_expected(state, key, expected)?;

    state.drop_placements_and_scores(key);
    let version = state.next_version();
    if let Some(function) = state.functions.remove(key) {
        for revision in &function.revisions {
            count_use(state, revision.digest, context.now, |uses| uses - 1);
        }
        retire(state, key, Retired { last: function.generation(), version });
    }
    Ok(Applied::Deleted { version })
}

/// When too many are remembered, the one deleted first is forgotten: every worker has long dropped
/// what it had of it.
fn retire(state: &mut State, key: &FunctionKey, retired: Retired) {
    state.retired.insert(key.clone(), retired);
    if state.retired.len() > RETIRED_MAX {
        let oldest = state.retired.iter().min_by_key(|(_, it)| it.version).map(|(key, _)| key.clone());
        if let Some(oldest) = oldest {
            state.retired.remove(&oldest);
            state.forget_usage(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Command;
    use crate::commands::testing::{Log, apply, delete, digest, key};

    #[test]
    fn a_deleted_function_releases_its_artifacts() {
        let mut log = Log::with_artifacts(&["m1", "m2"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(apply("f", "m2")).unwrap();
        let version = log.state.version();
        assert_eq!(log.apply(delete("f")), Ok(Applied::Deleted { version: version + 1 }));
        assert!(log.state.function(&key("f")).is_none());
        assert_eq!(log.state.artifacts().map(|it| it.uses).collect::<Vec<_>>(), vec![0, 0]);
        assert!(log.state.artifact(&digest("m1")).is_some());
    }

    #[test]
    fn refuses_an_unknown_name_and_a_stale_version() {
        let mut log = Log::with_artifacts(&["m1"]);
        assert_eq!(log.refused(delete("f")), Refusal::FunctionNotFound { key: key("f") });
        log.apply(apply("f", "m1")).unwrap();
        let actual = log.state.version();
        let stale = Command::DeleteFunction { key: key("f"), expected: Some(actual + 1) };
        assert_eq!(log.refused(stale), Refusal::Conflict { key: key("f"), expected: actual + 1, actual });
    }
}
