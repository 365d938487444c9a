//! Switches the rules by which the commands after this one are applied.

use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::rules::RulesVersion;
use crate::state::State;

pub(crate) fn set_cluster_version(state: &mut State, version: RulesVersion) -> CommandOutcome {
    if version == state.rules {
        return Ok(CommandEffect::Unchanged);
    }
    if !state.may_switch_to(version) {
        let problem = format!(
            "cluster version {version} does not follow version {}, which is in force: go one version at a time",
            state.rules
        );
        return Err(CommandRefusal::InvalidSpec { problem });
    }
    state.rules = version;
    // A cluster without a name has no resources, and so no resource versions.
    let version = if state.cluster.is_some() { state.next_version() } else { state.version };
    Ok(CommandEffect::Changed { version })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::TestLog;

    fn set(version: u64) -> StateCommand {
        StateCommand::SetClusterVersion { version: RulesVersion(version) }
    }

    #[test]
    fn rules_are_switched_one_version_at_a_time_and_never_back() {
        let mut log = TestLog::of_rules(RulesVersion(9));
        let before = log.state.version();
        assert!(matches!(log.refused(set(11)), CommandRefusal::InvalidSpec { .. }));
        assert_eq!(log.apply(set(9)), Ok(CommandEffect::Unchanged));
        assert_eq!(log.apply(set(10)), Ok(CommandEffect::Changed { version: before + 1 }));
        assert_eq!(log.apply(set(10)), Ok(CommandEffect::Unchanged));
        assert!(matches!(log.refused(set(9)), CommandRefusal::InvalidSpec { .. }));
        assert_eq!(log.state.rules(), RulesVersion(10));
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
    }

    #[test]
    fn a_cluster_without_a_name_starts_with_the_given_rules() {
        let mut log = TestLog::empty();
        assert_eq!(log.state.rules(), RulesVersion::NEWEST);
        log.state = State::default();
        assert_eq!(log.apply(set(10)), Ok(CommandEffect::Changed { version: 0 }));
        assert_eq!(log.state.check_invariants(), Ok(()));
    }
}
