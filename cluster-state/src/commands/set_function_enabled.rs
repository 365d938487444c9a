//! Starts or stops serving a function. The function keeps its revisions and its generation.

use std::sync::Arc;

use millrace_types::FunctionKey;

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::state::State;

pub(crate) fn set_function_enabled(
    state: &mut State,
    context: CommandContext<'_>,
    key: &FunctionKey,
    enabled: bool,
) -> CommandOutcome {
    let Some(mut function) = state.functions.get(key).cloned() else {
        return Err(CommandRefusal::FunctionNotFound { key: key.clone() });
    };
    if function.enabled == enabled {
        return Ok(CommandEffect::Unchanged);
    }
    let version = state.next_version();
    let changed = Arc::make_mut(&mut function);
    changed.enabled = enabled;
    changed.resource_version = version;
    changed.updated_at = context.now;
    changed.updated_by = context.caller.clone();
    state.functions.insert(key.clone(), function);
    Ok(CommandEffect::Changed { version })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, apply, key};

    fn set(enabled: bool) -> StateCommand {
        StateCommand::SetFunctionEnabled { key: key("f"), enabled }
    }

    #[test]
    fn disabling_a_function_changes_its_version_but_not_its_generation() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        assert_eq!(log.refused(set(false)), CommandRefusal::FunctionNotFound { key: key("f") });
        log.apply(apply("f", "m1")).unwrap();
        let version = log.state.version();
        assert_eq!(log.apply(set(true)), Ok(CommandEffect::Unchanged));
        assert_eq!(log.apply(set(false)), Ok(CommandEffect::Changed { version: version + 1 }));
        let function = log.state.function(&key("f")).unwrap();
        assert_eq!((function.enabled, function.generation().get()), (false, 1));
    }

    #[test]
    fn a_new_revision_of_a_disabled_function_stays_disabled() {
        let mut log = TestLog::with_artifacts(&["m1", "m2"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(set(false)).unwrap();
        log.apply(apply("f", "m2")).unwrap();
        assert!(!log.state.function(&key("f")).unwrap().enabled);
    }
}
