//! Telemetry: the node state that routing reads, sent every 100 ms, and at once when a model is
//! loaded or evicted or a GPU changes its state.
//!
//! Telemetry is one message of at most [`TELEMETRY_BYTES_MAX`], however many models the node holds.
//! A message names the [`GPU_MODELS_MAX`] most recently used models on GPUs, some of each model's
//! functions, and [`HOST_MODELS_MAX`] models in host memory. Routing assumes that a model that is
//! not named is in host memory. Omitted models are counted.
//!
//! [`TELEMETRY_BYTES_MAX`]: millrace_proto::parts::TELEMETRY_BYTES_MAX

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use millrace_gpu::SliceUse;
use millrace_proto::convert::duration_wire;
use millrace_proto::slices::SliceUse as SliceUseWire;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, SliceId, SmShare};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::desired_state::{DesiredState, NodeScheduling};
use crate::handle::NodeHandle;
use crate::host_tier::HostTierCounts;
use crate::snapshot::{GpuHealth, GpuSnapshot, NodeSnapshot, ResidentModel, RunningRequest, SnapshotScope};

/// Interval between messages without changes.
const PERIOD: Duration = Duration::from_millis(100);
/// Shortest interval between messages; changes within the interval are sent together.
const MIN_GAP: Duration = Duration::from_millis(10);

/// Maximum number of named models on GPUs, for all GPUs together.
const GPU_MODELS_MAX: usize = 2_048;
/// Maximum number of named functions of a model.
const MODEL_FUNCTIONS_MAX: usize = 16;
/// Maximum bytes of function names beyond the first of each model, for all models together.
const FUNCTION_NAMES_BYTES_MAX: usize = 256 << 10;
/// Maximum number of named models in host memory.
const HOST_MODELS_MAX: usize = 1_024;

/// The host tier's contribution to telemetry.
#[derive(Debug, Clone)]
pub struct HostTierTelemetry {
    /// Maximum host memory of models.
    pub budget: Bytes,
    /// Models in host memory.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// Counts of cold starts and evictions.
    pub counts: watch::Receiver<Arc<HostTierCounts>>,
}

/// Publishes telemetry while the channel has receivers. Each session fills in the epoch.
pub async fn publish(
    node: NodeHandle,
    host: HostTierTelemetry,
    desired: watch::Receiver<DesiredState>,
    telemetry: watch::Sender<Arc<wire::Telemetry>>,
) {
    let mut changes = node.changes();
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for seq in 1.. {
        tokio::select! {
            _ = period.tick() => {}
            // A closed channel means that the node is shutting down: the period alone continues.
            Ok(()) = changes.changed() => period.reset(),
            () = telemetry.closed() => return,
        }
        changes.mark_unchanged();
        let snapshot = node.partial_snapshot(SnapshotScope::Machine).await;
        let scheduling = desired.borrow().scheduling;
        let group_bytes = node.weight_group_bytes().map_or(0, Bytes::get);
        let now = wire::Telemetry { group_bytes, ..wire_telemetry(seq, &snapshot, &host, scheduling) };
        telemetry.send_replace(Arc::new(now));
        tokio::time::sleep(MIN_GAP).await;
    }
}

fn wire_telemetry(
    seq: u64,
    snapshot: &NodeSnapshot,
    host: &HostTierTelemetry,
    scheduling: NodeScheduling,
) -> wire::Telemetry {
    let models = host.models.borrow();
    let counts = **host.counts.borrow();
    let mut names = NameBudget::new(snapshot);
    wire::Telemetry {
        epoch: 0,
        seq,
        gpus: snapshot.gpus.iter().map(|it| gpu(it, snapshot, &mut names)).collect(),
        queued: snapshot.queued,
        host_tier_bytes: models.iter().map(|model| model.bytes).sum(),
        host_models: models.iter().take(HOST_MODELS_MAX).map(|model| host_model(model, snapshot)).collect(),
        host_models_left_out: left_out(models.len(), HOST_MODELS_MAX),
        scheduling: wire::NodeScheduling::from(scheduling).into(),
        host_budget_bytes: host.budget.get(),
        cold_starts: counts.cold_starts,
        host_evictions: counts.evictions,
        group_bytes: 0,
        policy: snapshot.policy.map(|policy| policy.wire()),
        waiting_ns: nanos(snapshot.work.waiting),
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Adds a model's measured load time.
fn host_model(model: &wire::HostModel, snapshot: &NodeSnapshot) -> wire::HostModel {
    let load = model.digest.parse().ok().and_then(|digest: Digest| snapshot.loads.get(&digest));
    wire::HostModel { load_ns: load.copied().map_or(0, nanos), ..model.clone() }
}

/// The remaining capacity for names in a telemetry message.
struct NameBudget {
    /// Idle time of the most recently used model that is omitted; `None`: all models are named.
    idle_limit: Option<Duration>,
    /// Number of models with exactly that idle time that may still be named.
    at_limit: usize,
    /// Bytes left for the names of functions beyond the first of each model.
    bytes_left: usize,
}

impl NameBudget {
    fn new(snapshot: &NodeSnapshot) -> Self {
        let models = snapshot.gpus.iter().flat_map(|gpu| &gpu.models);
        let mut idle: Vec<_> = models.map(|model| model.idle).collect();
        let mut names = Self { idle_limit: None, at_limit: 0, bytes_left: FUNCTION_NAMES_BYTES_MAX };
        if idle.len() > GPU_MODELS_MAX {
            let (used_last, &mut limit, _) = idle.select_nth_unstable(GPU_MODELS_MAX);
            names.idle_limit = Some(limit);
            names.at_limit = used_last.iter().filter(|&&it| it == limit).count();
        }
        names
    }

    /// Whether a model with this idle time is named.
    fn has(&mut self, idle: Duration) -> bool {
        match self.idle_limit.map(|limit| idle.cmp(&limit)) {
            None | Some(Ordering::Less) => true,
            Some(Ordering::Greater) => false,
            Some(Ordering::Equal) => match self.at_limit.checked_sub(1) {
                Some(left) => {
                    self.at_limit = left;
                    true
                }
                None => false,
            },
        }
    }
}

fn left_out(all: usize, named: usize) -> u32 {
    u32::try_from(all.saturating_sub(named)).unwrap_or(u32::MAX)
}

fn gpu(gpu: &GpuSnapshot, node: &NodeSnapshot, names: &mut NameBudget) -> wire::GpuTelemetry {
    let health = match gpu.health {
        GpuHealth::Starting => wire::GpuHealth::Starting,
        GpuHealth::Up => wire::GpuHealth::Up,
        GpuHealth::Restarting => wire::GpuHealth::Restarting,
        GpuHealth::Unhealthy => wire::GpuHealth::Unhealthy,
    };
    let mut models = Vec::new();
    for it in &gpu.models {
        if names.has(it.idle) {
            models.push(model(it, &gpu.running, names));
        }
    }
    wire::GpuTelemetry {
        index: gpu.index.0,
        health: health.into(),
        memory_bytes: gpu.memory.get(),
        used_bytes: gpu.used.get(),
        models_left_out: left_out(gpu.models.len(), models.len()),
        models,
        running: gpu.running.iter().map(running).collect(),
        sm_violations: gpu.sm_violations,
        slices: gpu.slices.iter().map(slice_use).collect(),
        incarnation: gpu.incarnation.0,
        executor_pid: gpu.executor_pid.unwrap_or_default(),
        executor_pids: gpu.executor_pids.clone(),
        restarts: gpu.restarts,
        swaps: gpu.swaps,
        peer_swaps: gpu.peer_swaps,
        evictions: gpu.evictions,
        busy_ns: nanos(gpu.busy),
        assigned_ns: node.work.assigned.get(gpu.index.0 as usize).copied().map_or(0, nanos),
        gpu_type: gpu.gpu_type.clone(),
        object_bytes: gpu.data.used.get(),
    }
}

fn slice_use(&(id, used): &(SliceId, SliceUse)) -> SliceUseWire {
    SliceUseWire {
        id: id.0,
        used_permille: used.used.get().into(),
        busy_ns: nanos(used.busy),
        sm_ns: nanos(used.sm),
        starved: used.starved,
    }
}

fn running(running: &RunningRequest) -> wire::RunningRequest {
    let (first_unit, units) = match running.sms {
        Some(SmShare::Block(block)) => (block.first().into(), block.width().into()),
        // A percentage is on no certain units.
        Some(SmShare::Cap(_)) | None => (0, 0),
    };
    wire::RunningRequest { function: running.function.to_string(), first_unit, units }
}

fn model(model: &ResidentModel, running: &[RunningRequest], names: &mut NameBudget) -> wire::ResidentModel {
    let running: Vec<_> = running.iter().map(|it| &it.function).collect();
    let (running, others): (Vec<_>, Vec<_>) = model.functions.iter().partition(|it| running.contains(it));
    let mut functions = Vec::new();
    for function in running.into_iter().chain(others).take(MODEL_FUNCTIONS_MAX) {
        let name = function.to_string();
        if !functions.is_empty() {
            let Some(left) = names.bytes_left.checked_sub(name.len()) else { break };
            names.bytes_left = left;
        }
        functions.push(name);
    }
    wire::ResidentModel {
        functions,
        digest: model.digest.to_string(),
        bytes: model.bytes.get(),
        loaded_bytes: model.loaded.get(),
        idle: Some(duration_wire(model.idle)),
        executor_pid: model.executor_pid.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use millrace_proto::parts::TELEMETRY_BYTES_MAX;
    use millrace_scheduling::dispatch::NodeWork;
    use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
    use millrace_types::{Bytes, Digest, GpuIndex, Incarnation};
    use prost::Message as _;

    use super::*;
    use millrace_types::RevisionKey;

    #[test]
    fn telemetry_reports_the_snapshot() {
        let digest = Digest::of(b"m");
        let model = ResidentModel {
            digest,
            functions: Vec::new(),
            bytes: Bytes(10),
            loaded: Bytes(7),
            idle: Duration::from_secs(3),
            executor_pid: Some(9),
        };
        let snapshot = NodeSnapshot {
            gpus: vec![GpuSnapshot {
                index: GpuIndex(1),
                health: GpuHealth::Restarting,
                memory: Bytes(100),
                used: Bytes(10),
                executor_pids: vec![8, 9],
                ..with_models(vec![model], None)
            }],
            queued: 6,
            work: NodeWork {
                assigned: [0, 7].map(Duration::from_micros).to_vec(),
                waiting: Duration::from_micros(8),
            },
            loads: Arc::new([(digest, Duration::from_micros(9))].into()),
            ..NodeSnapshot::default()
        };
        let models = vec![wire::HostModel { digest: digest.to_string(), bytes: 10, load_ns: 0 }];
        let models_with_loads = vec![wire::HostModel { load_ns: 9_000, ..models[0].clone() }];
        let counts = HostTierCounts { cold_starts: 4, evictions: 5 };
        let host = HostTierTelemetry {
            budget: Bytes(20),
            models: watch::channel(Arc::new(models)).1,
            counts: watch::channel(Arc::new(counts)).1,
        };
        let idle = Some(duration_wire(Duration::from_secs(3)));
        let expected = wire::Telemetry {
            epoch: 0,
            seq: 9,
            gpus: vec![wire::GpuTelemetry {
                index: 1,
                health: wire::GpuHealth::Restarting.into(),
                memory_bytes: 100,
                used_bytes: 10,
                models: vec![wire::ResidentModel {
                    functions: Vec::new(),
                    digest: digest.to_string(),
                    bytes: 10,
                    loaded_bytes: 7,
                    idle,
                    executor_pid: 9,
                }],
                running: Vec::new(),
                sm_violations: 0,
                slices: Vec::new(),
                incarnation: 4,
                executor_pid: 0,
                executor_pids: vec![8, 9],
                restarts: 3,
                swaps: 2,
                peer_swaps: 1,
                evictions: 1,
                busy_ns: 5000,
                gpu_type: "V100".into(),
                object_bytes: 0,
                models_left_out: 0,
                assigned_ns: 7_000,
            }],
            queued: 6,
            host_tier_bytes: 10,
            host_models: models_with_loads,
            scheduling: wire::NodeScheduling::Cordoned.into(),
            host_budget_bytes: 20,
            cold_starts: 4,
            host_evictions: 5,
            group_bytes: 0,
            policy: None,
            host_models_left_out: 0,
            waiting_ns: 8_000,
        };
        assert_eq!(wire_telemetry(9, &snapshot, &host, NodeScheduling::Cordoned), expected);
    }

    fn key(number: usize) -> RevisionKey {
        let name = format!("{}{number:05}", "n".repeat(50));
        let function = millrace_proto::convert::function_key(&"t".repeat(60), &name).unwrap();
        RevisionKey { function, revision: millrace_types::Revision::FIRST }
    }

    fn resident(number: usize, functions: Vec<RevisionKey>) -> ResidentModel {
        ResidentModel {
            digest: Digest::of(&number.to_le_bytes()),
            functions,
            bytes: Bytes(u64::MAX),
            loaded: Bytes(u64::MAX),
            idle: Duration::from_millis(number as u64),
            executor_pid: Some(u32::MAX),
        }
    }

    fn with_models(models: Vec<ResidentModel>, running: Option<RevisionKey>) -> GpuSnapshot {
        GpuSnapshot {
            index: GpuIndex(0),
            gpu_type: "V100".into(),
            health: GpuHealth::Up,
            memory: Bytes(u64::MAX),
            used: Bytes(u64::MAX),
            models,
            running: running.into_iter().map(|function| RunningRequest { function, sms: None }).collect(),
            sm_violations: 0,
            slices: Vec::new(),
            incarnation: Incarnation(4),
            executor_pid: None,
            executor_pids: Vec::new(),
            restarts: 3,
            swaps: 2,
            peer_swaps: 1,
            evictions: 1,
            busy: Duration::from_micros(5),
            data: crate::snapshot::GpuData::default(),
        }
    }

    fn reported(gpus: Vec<GpuSnapshot>, host_models: usize) -> wire::Telemetry {
        let host_model = |number: usize| wire::HostModel {
            digest: Digest::of(&number.to_le_bytes()).to_string(),
            bytes: 1 << 48,
            load_ns: u64::MAX,
        };
        let host = HostTierTelemetry {
            budget: Bytes(20),
            models: watch::channel(Arc::new((0..host_models).map(host_model).collect())).1,
            counts: watch::channel(Arc::new(HostTierCounts::default())).1,
        };
        wire_telemetry(
            1,
            &NodeSnapshot { gpus, ..NodeSnapshot::default() },
            &host,
            NodeScheduling::Schedulable,
        )
    }

    #[test]
    fn telemetry_of_one_model_with_the_most_functions_names_the_running_one_first() {
        let functions: Vec<_> = (0..FUNCTIONS_PER_NODE_MAX).map(key).collect();
        let running = functions[20_000].clone();
        let telemetry = reported(vec![with_models(vec![resident(0, functions)], Some(running.clone()))], 1);
        let named = &telemetry.gpus[0].models[0].functions;
        assert_eq!((named.len(), &named[0]), (MODEL_FUNCTIONS_MAX, &running.to_string()));
        assert_eq!(named[1], key(0).to_string());
        assert!(telemetry.encoded_len() <= TELEMETRY_BYTES_MAX, "{}", telemetry.encoded_len());
    }

    #[test]
    fn telemetry_names_the_models_used_last_and_counts_the_others() {
        // Each of two GPUs has half of the models, each with more functions than are named.
        let models = |gpu: usize| {
            let numbers = (0..FUNCTIONS_PER_NODE_MAX).filter(|number| number % 2 == gpu);
            with_models(numbers.map(|number| resident(number, (0..20).map(key).collect())).collect(), None)
        };
        let telemetry = reported(vec![models(0), models(1)], FUNCTIONS_PER_NODE_MAX);
        for gpu in &telemetry.gpus {
            let named = gpu.models.iter().map(|model| model.idle.unwrap());
            let idle_max = named.map(|idle| Duration::try_from(idle).unwrap()).max().unwrap();
            assert!(idle_max < Duration::from_millis(GPU_MODELS_MAX as u64), "{idle_max:?}");
            assert_eq!(gpu.models.len(), GPU_MODELS_MAX / 2);
            assert_eq!(gpu.models_left_out as usize, FUNCTIONS_PER_NODE_MAX / 2 - GPU_MODELS_MAX / 2);
            assert!(gpu.models.iter().all(|model| !model.functions.is_empty()));
        }
        // Of models with equal idle times, some are named.
        let mut equal =
            with_models((0..=GPU_MODELS_MAX).map(|it| resident(it, vec![key(it)])).collect(), None);
        equal.models.iter_mut().for_each(|model| model.idle = Duration::ZERO);
        assert_eq!(reported(vec![equal], 0).gpus[0].models.len(), GPU_MODELS_MAX);
        assert_eq!(telemetry.host_models.len(), HOST_MODELS_MAX);
        assert_eq!(telemetry.host_models_left_out as usize, FUNCTIONS_PER_NODE_MAX - HOST_MODELS_MAX);
        assert!(telemetry.encoded_len() <= TELEMETRY_BYTES_MAX, "{}", telemetry.encoded_len());
    }
}
