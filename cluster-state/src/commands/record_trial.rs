//! Records the result of a trial in the profile of the operation's model. The points of an earlier operation on
//! the same type of GPU are dropped.

use millrace_types::Digest;
use millrace_types::limits::PROFILES_PER_ARTIFACT_MAX;
use millrace_types::profile::{GpuProfile, PROFILE_POINTS_MAX, ProfilePoint};

use crate::operation_record::OperationKind;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::state::State;

pub(crate) fn record_trial(
    state: &mut State,
    id: u64,
    gpu_type: &str,
    point: &ProfilePoint,
) -> CommandOutcome {
    let operation = state.operations.get(&id).ok_or(CommandRefusal::OperationNotFound { id })?;
    let digest = match &operation.kind {
        OperationKind::ProfileFunction { digest, .. } if operation.is_running() => *digest,
        _ => return Err(CommandRefusal::OperationNotFound { id }),
    };
    let artifact = state.artifacts.get(&digest).ok_or(CommandRefusal::ArtifactNotFound { digest })?;
    let mut profiles = artifact.profiles.clone();
    add_point(&mut profiles, id, gpu_type, point);
    if profiles == artifact.profiles {
        return Ok(CommandEffect::Unchanged);
    }
    let version = state.next_version();
    state.artifacts.change(&digest, |artifact| artifact.profiles = profiles);
    Ok(CommandEffect::Changed { version })
}

fn add_point(profiles: &mut Vec<GpuProfile>, operation: u64, gpu_type: &str, point: &ProfilePoint) {
    let place = profiles.iter().position(|profile| profile.gpu_type == gpu_type).unwrap_or_else(|| {
        if profiles.len() >= PROFILES_PER_ARTIFACT_MAX
            && let Some(oldest) = profiles.iter().map(|profile| profile.operation).min()
        {
            profiles.retain(|profile| profile.operation != oldest);
        }
        profiles.push(GpuProfile { gpu_type: gpu_type.to_owned(), operation, points: Vec::new() });
        profiles.len() - 1
    });
    let profile = &mut profiles[place];
    if profile.operation != operation {
        profile.operation = operation;
        profile.points.clear();
    }
    match profile.points.iter().position(|known| known.setting == point.setting) {
        Some(place) => profile.points[place] = *point,
        None if profile.points.len() < PROFILE_POINTS_MAX => profile.points.push(*point),
        None => {}
    }
}

impl State {
    /// Returns the points that an operation has measured on a type of GPU.
    #[must_use]
    pub fn points_of<'a>(&'a self, operation: u64, digest: &Digest, gpu_type: &str) -> &'a [ProfilePoint] {
        let profiles = self.artifacts.get(digest).map(|artifact| artifact.profiles.as_slice());
        let mut profiles = profiles.into_iter().flatten();
        let found = profiles.find(|it| it.operation == operation && it.gpu_type == gpu_type);
        found.map_or(&[], |profile| &profile.points)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::profile::TrialSetting;

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, apply, delete, digest, key};
    use crate::operation_record::OperationResult;
    use crate::operations::PROFILE_LIFE_MAX;
    use crate::rules::RulesVersion;

    fn point(units: u8, millis: u64) -> ProfilePoint {
        let setting = TrialSetting::whole_time(units).unwrap();
        ProfilePoint { runs: 200, p50: Duration::from_millis(millis), ..ProfilePoint::new(setting) }
    }

    fn begin(function: &str, model: &str, grid: bool) -> StateCommand {
        let kind = OperationKind::ProfileFunction { function: key(function), digest: digest(model), grid };
        StateCommand::BeginOperation { kind }
    }

    fn record(operation: u64, gpu_type: &str, point: ProfilePoint) -> StateCommand {
        StateCommand::RecordTrial { operation, gpu_type: gpu_type.into(), point }
    }

    fn end(id: u64, end: OperationResult) -> StateCommand {
        StateCommand::EndOperation { id, end }
    }

    /// Returns a log with a function and a running profile of it.
    fn profiling() -> (TestLog, u64) {
        let mut log = TestLog::with_artifacts(&["m", "other"]);
        log.apply(apply("f", "m")).unwrap();
        log.apply(begin("f", "m", false)).unwrap();
        let id = log.state.version();
        (log, id)
    }

    fn units(log: &TestLog, operation: u64, gpu_type: &str) -> Vec<u8> {
        let points = log.state.points_of(operation, &digest("m"), gpu_type);
        points.iter().map(|point| point.setting.units()).collect()
    }

    #[test]
    fn the_points_of_an_operation_are_kept_by_type_of_gpu() {
        let (mut log, id) = profiling();
        assert!(log.apply(record(id, "A", point(16, 10))).unwrap().changed());
        assert!(log.apply(record(id, "A", point(1, 90))).unwrap().changed());
        assert!(log.apply(record(id, "B", point(16, 5))).unwrap().changed());
        assert_eq!(log.apply(record(id, "A", point(1, 90))), Ok(CommandEffect::Unchanged));
        assert_eq!((units(&log, id, "A"), units(&log, id, "B")), (vec![16, 1], vec![16]));
        let operation = log.state.operation(id).unwrap();
        assert_eq!((log.state.steps_done(operation), operation.total), (3, 5));
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
        log.apply(end(id, OperationResult::Succeeded)).unwrap();
        assert_eq!(log.refused(record(id, "A", point(2, 50))), CommandRefusal::OperationNotFound { id });
        log.apply(begin("f", "m", true)).unwrap();
        let second = log.state.version();
        log.apply(record(second, "A", point(4, 20))).unwrap();
        assert_eq!((units(&log, id, "A"), units(&log, second, "A")), (vec![], vec![4]));
        assert_eq!(units(&log, id, "B"), [16], "the other type keeps its points");
    }

    #[test]
    fn a_model_has_profiles_of_a_bounded_number_of_types() {
        let (mut log, id) = profiling();
        for number in 0..PROFILES_PER_ARTIFACT_MAX + 3 {
            log.apply(record(id, &format!("type-{number}"), point(16, 10))).unwrap();
            assert!(log.state.artifact(&digest("m")).unwrap().profiles.len() <= PROFILES_PER_ARTIFACT_MAX);
        }
    }

    #[test]
    fn a_profile_is_refused_for_another_model_a_second_time_and_under_older_rules() {
        let (mut log, id) = profiling();
        let problem = |log: &mut TestLog, command| log.refused(command).to_string();
        assert!(problem(&mut log, begin("g", "m", false)).contains("get functions"));
        assert!(problem(&mut log, begin("f", "other", false)).contains("try again"));
        assert!(problem(&mut log, begin("f", "m", true)).contains(&format!("operation cancel {id}")));
        log.apply(end(id, OperationResult::Cancelled)).unwrap();
        log.state.rules = RulesVersion(9);
        for command in [begin("f", "m", true), record(id, "A", point(16, 10))] {
            let refused = log.state.admit(&log.proposal(command)).unwrap_err();
            assert!(refused.to_string().contains("upgrade all controllers"), "{refused}");
        }
    }

    #[test]
    fn a_profile_ends_with_its_function_and_after_its_time() {
        let (mut log, id) = profiling();
        log.apply(delete("f")).unwrap();
        assert!(!log.state.operation(id).unwrap().is_running());
        let (mut log, id) = profiling();
        log.tick(PROFILE_LIFE_MAX.as_millis() as u64 - 1_000);
        log.apply(record(id, "A", point(16, 10))).unwrap();
        log.tick(2_000);
        assert!(log.apply(record(id, "A", point(1, 10))).is_err());
        let ended = log.state.operation(id).unwrap().ended.clone();
        let Some((_, OperationResult::Failed { why })) = ended else { panic!("{ended:?}") };
        assert!(why.contains("other requests"), "{why}");
    }
}
