//! Carries out the trials of profiles while this controller leads. Each trial is a call to a worker, and its result
//! a command of its own. The next leader goes on with the trials that have no result.
//!
//! The leader itself begins the profile of a function whose number of slices follows the load.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use millrace_cluster_state::operations::{OperationKind, OperationResult};
use millrace_cluster_state::{CallerName, FunctionRecord, State, StateCommand};
use millrace_proto::convert::profile_point;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::profile::ProfilePoint;
use millrace_types::{Digest, Failure, GpuIndex, NodeName, Reason};
use tokio::time::{Instant, sleep, timeout};
use tonic::Request;

use super::duties::Duties;
use super::slice_scaling::{run_speed, scaled_slices};
use crate::fleet::Workers;
use crate::profile_trials::{NextTrial, ProfileStep, next_step};

/// The interval between two looks at the running profiles.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The pause of a profile after a trial that did not succeed.
const REST: Duration = Duration::from_secs(5);
/// The interval between two looks for functions without a profile.
const MISSING_EVERY: Duration = Duration::from_secs(1);
/// Number of running profiles from which on the leader begins no other.
const RUNNING_MAX: usize = 16;
/// The pause before the leader begins a profile of the same model again.
const AGAIN_AFTER: Duration = Duration::from_secs(600);
/// The time after which a trial counts as lost. A worker gives a trial up earlier.
const TRIAL_MAX: Duration = Duration::from_secs(150);

/// The end of a trial.
struct EndedTrial {
    operation: u64,
    node: NodeName,
    result: Result<(GpuIndex, ProfilePoint), Failure>,
}

/// Carries out trials while polled: as long as this controller leads.
pub(super) async fn keep(duties: &Duties) {
    let mut trials = FuturesUnordered::new();
    let mut under_way: BTreeMap<u64, NodeName> = BTreeMap::new();
    let mut resting: BTreeMap<u64, Instant> = BTreeMap::new();
    let mut begun: BTreeMap<Digest, Instant> = BTreeMap::new();
    let mut missing_at = Instant::now();
    loop {
        let state = duties.replica.state();
        let workers = duties.fleet.workers();
        if missing_at <= Instant::now() {
            missing_at = Instant::now() + MISSING_EVERY;
            begun.retain(|_, at| at.elapsed() < AGAIN_AFTER);
            let is_profile = |kind: &OperationKind| matches!(kind, OperationKind::ProfileFunction { .. });
            let running = state.operations().filter(|it| it.is_running() && is_profile(&it.kind)).count();
            let missing = missing_profiles(&state, &workers);
            let missing = missing.into_iter().filter(|(digest, _)| !begun.contains_key(digest));
            for (digest, command) in missing.take(RUNNING_MAX.saturating_sub(running)).collect::<Vec<_>>() {
                begun.insert(digest, Instant::now());
                propose(duties, command).await;
            }
        }
        resting.retain(|_, until| *until > Instant::now());
        for operation in state.operations() {
            let id = operation.id;
            if under_way.contains_key(&id) || resting.contains_key(&id) {
                continue;
            }
            let taken: BTreeSet<_> = under_way.values().cloned().collect();
            let end = match next_step(&state, &workers, operation, &taken) {
                None | Some(ProfileStep::Wait(_)) => continue,
                Some(ProfileStep::Trial(trial)) => {
                    under_way.insert(id, trial.worker.name.clone());
                    trials.push(run(id, trial));
                    continue;
                }
                Some(ProfileStep::Complete) => OperationResult::Succeeded,
                Some(ProfileStep::ModelChanged) => OperationResult::Failed {
                    why: "the function has got another model: profile it again".into(),
                },
            };
            propose(duties, StateCommand::EndOperation { id, end }).await;
            resting.insert(id, Instant::now() + LOOK_EVERY);
        }
        tokio::select! {
            Some(EndedTrial { operation, node, result }) = trials.next() => {
                under_way.remove(&operation);
                if let Some(rest) = record(duties, operation, &node, result).await {
                    resting.insert(operation, Instant::now() + rest);
                }
            }
            () = sleep(LOOK_EVERY) => {}
        }
    }
}

/// Returns the models that need a profile and have none, each with the command that begins the profile.
fn missing_profiles(state: &State, workers: &Workers) -> BTreeMap<Digest, StateCommand> {
    if !workers.values().any(|worker| worker.shares_gpus() == Some(true)) {
        return BTreeMap::new();
    }
    let needs = |function: &FunctionRecord| {
        // A trial has no state to run on.
        let is_profilable = function.enabled && function.latest().spec.sequences.is_none();
        let (asked, _) = scaled_slices(function).filter(|_| is_profilable)?;
        let digest = function.latest().digest;
        let kind = OperationKind::ProfileFunction { function: function.key.clone(), digest, grid: false };
        let known = run_speed(state, function, asked);
        known.is_none().then_some((digest, StateCommand::BeginOperation { kind }))
    };
    state.functions().filter_map(|function| needs(function)).collect()
}

async fn run(operation: u64, trial: NextTrial) -> EndedTrial {
    let NextTrial { worker, revision, setting } = trial;
    let node = worker.name.clone();
    let request = wire::RunTrialRequest {
        tenant: revision.function.tenant.to_string(),
        function: revision.function.name.to_string(),
        revision: revision.revision.get(),
        sm_units: setting.units().into(),
        quota_permille: setting.quota().get().into(),
        request_id: format!("profile-{operation}-{}-{}", setting.units(), setting.quota().get()),
    };
    let answered = async {
        let answer = worker.calls.run_trial(Request::new(request)).await;
        let answer = answer.map_err(|status| from_status(&status))?.into_inner();
        let point = answer.point.ok_or_else(|| Failure::malformed("the trial has no result"))?;
        Ok((GpuIndex(answer.gpu), profile_point(point)?))
    };
    let late = || Failure::new(Reason::TimedOut, format!("node {node} did not answer within {TRIAL_MAX:?}"));
    let result = tokio::select! {
        result = timeout(TRIAL_MAX, answered) => result.unwrap_or_else(|_| Err(late())),
        () = worker.gone() => Err(Failure::new(Reason::NoWorker, format!("node {node} was lost"))),
    };
    EndedTrial { operation, node, result }
}

/// Records the end of a trial. Returns the pause before the next trial of the operation.
async fn record(
    duties: &Duties,
    operation: u64,
    node: &NodeName,
    result: Result<(GpuIndex, ProfilePoint), Failure>,
) -> Option<Duration> {
    let failure = match result {
        Ok((gpu, point)) => {
            let state = duties.replica.state();
            let gpus = state.node(node).into_iter().flat_map(|node| &node.gpus);
            let gpu_type = gpus.into_iter().find(|it| it.index == gpu)?.gpu_type.clone();
            propose(duties, StateCommand::RecordTrial { operation, gpu_type, point }).await;
            return None;
        }
        Err(failure) => failure,
    };
    tracing::info!(operation, %node, reason = %failure.reason, failure.message, "a trial of a profile did not succeed");
    // A node may have changed its policy meanwhile.
    if failure.retryable || failure.reason == Reason::OperationState {
        return Some(REST);
    }
    let why = format!("a trial on node {node} failed: {}", failure.message);
    let why = millrace_types::limits::text_prefix(&why, millrace_types::limits::REFUSAL_BYTES_MAX).to_owned();
    propose(duties, StateCommand::EndOperation { id: operation, end: OperationResult::Failed { why } }).await;
    Some(REST)
}

/// Proposes a command. Without success, the next look finds the operation as it was.
async fn propose(duties: &Duties, command: StateCommand) {
    let proposed = duties.replica.propose(CallerName("profiling".into()), None, command).await;
    if let Err(failure) = proposed {
        tracing::debug!(error = failure.message, "a step of a profile was not committed");
    }
}
