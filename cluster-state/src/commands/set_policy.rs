//! Sets the scheduling policy of running nodes. The last changes are kept with their callers, so
//! that operators can review them later.

use std::sync::Arc;

use millrace_types::PolicySpec;
use millrace_types::policy::Setting;

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::PolicyRecord;
use crate::state::{POLICIES_KEPT, State};

pub(crate) fn set_policy(
    state: &mut State,
    context: CommandContext<'_>,
    given: PolicySpec,
    settings: &[Setting],
    expected: Option<u64>,
) -> CommandOutcome {
    let before = state.policies.last();
    let actual = before.map_or(0, |it| it.resource_version);
    if let Some(expected) = expected.filter(|&expected| expected != actual) {
        return Err(CommandRefusal::PolicyConflict { expected, actual });
    }
    let known = before.map_or(PolicySpec::NONE, |it| it.spec);
    let spec = if settings.is_empty() { given } else { known.with(&given, settings) };
    spec.check().map_err(|error| CommandRefusal::InvalidSpec { problem: error.to_string() })?;
    if known == spec {
        return Ok(CommandEffect::Unchanged);
    }
    let generation = before.map_or(0, |it| it.generation) + 1;
    let version = state.next_version();
    let policy = PolicyRecord {
        spec,
        generation,
        resource_version: version,
        changed_at: context.now,
        changed_by: context.caller.clone(),
    };
    if state.policies.len() == POLICIES_KEPT {
        state.policies.remove(0);
    }
    state.policies.push(Arc::new(policy));
    if generation == 1 {
        Ok(CommandEffect::Created { version })
    } else {
        Ok(CommandEffect::Changed { version })
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::policy::{DispatchName, EvictionName};

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::TestLog;

    fn spec(dispatch: DispatchName) -> PolicySpec {
        PolicySpec { dispatch: Some(dispatch), ..PolicySpec::NONE }
    }

    fn set(spec: PolicySpec, expected: Option<u64>) -> StateCommand {
        StateCommand::SetPolicy { spec, settings: Vec::new(), expected }
    }

    #[test]
    fn each_policy_change_is_counted_and_kept_with_its_caller() {
        let mut log = TestLog::new();
        let version = log.state.version();
        assert_eq!(log.apply(set(PolicySpec::NONE, None)), Ok(CommandEffect::Unchanged), "nothing was set");
        let torpor = spec(DispatchName::Torpor);
        assert_eq!(log.apply(set(torpor, None)), Ok(CommandEffect::Created { version: version + 1 }));
        assert_eq!(log.apply(set(torpor, None)), Ok(CommandEffect::Unchanged));
        assert_eq!(
            log.apply(set(PolicySpec::NONE, None)),
            Ok(CommandEffect::Changed { version: version + 2 })
        );
        let kept: Vec<_> = log.state.policies().map(|it| (it.generation, it.spec)).collect();
        assert_eq!(kept, [(1, torpor), (2, PolicySpec::NONE)]);
        let last = log.state.policy().unwrap();
        assert_eq!((last.generation, &*last.changed_by.0), (2, "alice"));
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
    }

    #[test]
    fn a_stored_policy_with_a_retired_name_stays_as_it_was_stored() {
        let mut log = TestLog::new();
        log.apply(set(spec(DispatchName::Lb), None)).unwrap();
        let read = State::decode(&log.state.encode()).unwrap();
        assert_eq!(read.policy().unwrap().spec, spec(DispatchName::Lb));
        assert_eq!(read, log.state);
    }

    #[test]
    fn the_second_of_two_writers_with_the_same_expected_version_is_refused() {
        let mut log = TestLog::new();
        assert!(log.apply(set(spec(DispatchName::Lb), Some(0))).is_ok(), "no policy was set before");
        let refused = log.refused(set(spec(DispatchName::Fifo), Some(0)));
        let actual = log.state.policy().unwrap().resource_version;
        assert_eq!(refused, CommandRefusal::PolicyConflict { expected: 0, actual });
        assert!(log.apply(set(spec(DispatchName::Fifo), Some(actual))).is_ok());
    }

    #[test]
    fn a_setting_that_the_policy_does_not_read_is_refused() {
        let mut log = TestLog::new();
        let alone = PolicySpec { overtakes_max: Some(3), ..PolicySpec::NONE };
        assert!(matches!(log.refused(set(alone, None)), CommandRefusal::InvalidSpec { .. }));
        let only =
            || StateCommand::SetPolicy { spec: alone, settings: vec![Setting::OvertakesMax], expected: None };
        assert!(matches!(log.refused(only()), CommandRefusal::InvalidSpec { .. }));
        log.apply(set(spec(DispatchName::LalbO3), None)).unwrap();
        log.apply(only()).unwrap();
        let with = PolicySpec { overtakes_max: Some(3), ..spec(DispatchName::LalbO3) };
        assert_eq!(log.state.policy().unwrap().spec, with, "the new dispatch reads the setting");
    }

    #[test]
    fn a_repeated_write_does_not_undo_a_later_policy() {
        let mut log = TestLog::new();
        let torpor = PolicySpec { eviction: Some(EvictionName::Torpor), ..spec(DispatchName::Torpor) };
        let first =
            || StateCommand::SetPolicy { spec: torpor, settings: vec![Setting::Dispatch], expected: None };
        let answer = log.apply_keyed(first(), 1);
        assert!(answer.as_ref().unwrap().changed());
        log.apply(set(spec(DispatchName::Lb), None)).unwrap();
        assert_eq!(log.apply_keyed(first(), 1), answer);
        assert_eq!(log.state.policy().unwrap().spec, spec(DispatchName::Lb));
    }

    #[test]
    fn the_number_of_stored_policies_is_bounded() {
        let mut log = TestLog::new();
        for n in 0..=POLICIES_KEPT {
            let dispatch = if n % 2 == 0 { DispatchName::Lb } else { DispatchName::Fifo };
            log.apply(set(spec(dispatch), None)).unwrap();
        }
        let generations: Vec<_> = log.state.policies().map(|it| it.generation).collect();
        assert_eq!((generations.len(), generations[0]), (POLICIES_KEPT, 2));
    }
}
