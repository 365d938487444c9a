//! Removes a workflow that no other workflow runs. The state remembers its last generation.

use millrace_types::FunctionKey;

use super::{check_expected, check_unused, retire};
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::state::{RetiredName, State};
use crate::workflows::workflow_run;

pub(crate) fn delete_workflow(state: &mut State, key: &FunctionKey, expected: Option<u64>) -> CommandOutcome {
    let Some(workflow) = state.workflows.get(key) else {
        return Err(CommandRefusal::WorkflowNotFound { key: key.clone() });
    };
    check_expected(key, expected, Some(workflow.resource_version))?;
    check_unused(state, key, &workflow_run(key))?;

    let last = workflow.generation;
    let version = state.next_version();
    state.workflows.remove(key);
    retire(state, key, RetiredName { last, version });
    Ok(CommandEffect::Deleted { version })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{
        TestLog, apply, apply_workflow, chain, delete_workflow, key, run_function, run_workflow,
    };

    #[test]
    fn numbers_continue_when_a_deleted_name_returns_as_a_workflow_or_a_function() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        let spec = || chain("w", &[run_function("f")]);
        log.apply(apply_workflow(spec())).unwrap();
        log.apply(apply_workflow(chain("w", &[run_function("f"), run_function("f")]))).unwrap();
        let version = log.state.version();
        assert_eq!(log.apply(delete_workflow("w")), Ok(CommandEffect::Deleted { version: version + 1 }));
        assert!(log.state.workflow(&key("w")).is_none());
        log.apply(apply_workflow(spec())).unwrap();
        assert_eq!(log.state.workflow(&key("w")).unwrap().generation.get(), 3);
        log.apply(delete_workflow("w")).unwrap();
        log.apply(apply("w", "m1")).unwrap();
        assert_eq!(log.state.function(&key("w")).unwrap().generation().get(), 4);
    }

    #[test]
    fn deleting_an_unknown_workflow_or_a_stale_version_is_refused() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        assert_eq!(log.refused(delete_workflow("w")), CommandRefusal::WorkflowNotFound { key: key("w") });
        assert_eq!(log.refused(delete_workflow("f")), CommandRefusal::WorkflowNotFound { key: key("f") });
        log.apply(apply_workflow(chain("w", &[run_function("f")]))).unwrap();
        let actual = log.state.version();
        let stale = StateCommand::DeleteWorkflow { key: key("w"), expected: Some(actual - 1) };
        assert_eq!(
            log.refused(stale),
            CommandRefusal::Conflict { key: key("w"), expected: actual - 1, actual }
        );
        let fresh = StateCommand::DeleteWorkflow { key: key("w"), expected: Some(actual) };
        assert_eq!(log.apply(fresh), Ok(CommandEffect::Deleted { version: actual + 1 }));
    }

    #[test]
    fn deleting_a_workflow_that_another_runs_is_refused_until_the_other_is_deleted() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(apply_workflow(chain("inner", &[run_function("f")]))).unwrap();
        log.apply(apply_workflow(chain("outer", &[run_workflow("inner")]))).unwrap();
        let refused = log.refused(delete_workflow("inner"));
        assert_eq!(
            refused,
            CommandRefusal::InUse { key: key("inner"), by: vec![key("outer").name], more: 0 }
        );
        log.apply(delete_workflow("outer")).unwrap();
        assert!(log.apply(delete_workflow("inner")).is_ok());
    }
}
