//! What routing reads of this node, every 100 ms, and at once when a model or a GPU came or went.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::convert::duration_wire;
use millrace_proto::worker as wire;
use millrace_types::Bytes;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::desired::{Desired, Scheduling};
use crate::handle::NodeHandle;
use crate::host_tier::Counts;
use crate::snapshot::{GpuHealth, GpuSnapshot, Look, NodeSnapshot, ResidentModel};

/// How often telemetry is sent when nothing happens.
const PERIOD: Duration = Duration::from_millis(100);
/// The least time between two: changes in it go out together.
const MIN_GAP: Duration = Duration::from_millis(10);

/// What is told of the host tier.
#[derive(Debug, Clone)]
pub struct Host {
    /// The most that models take.
    pub budget: Bytes,
    /// Those that are in it.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// What it did.
    pub counts: watch::Receiver<Arc<Counts>>,
}

/// Publishes telemetry for as long as somebody receives it. The epoch is left to each session.
pub async fn publish(
    node: NodeHandle,
    host: Host,
    desired: watch::Receiver<Desired>,
    telemetry: watch::Sender<Arc<wire::Telemetry>>,
) {
    let mut changes = node.changes();
    let mut period = tokio::time::interval(PERIOD);
    period.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for seq in 1.. {
        tokio::select! {
            _ = period.tick() => {}
            // A closed channel is a node on its way down: the period alone goes on.
            Ok(()) = changes.changed() => period.reset(),
            () = telemetry.closed() => return,
        }
        changes.mark_unchanged();
        let snapshot = node.look(Look::Machine).await;
        let scheduling = desired.borrow().scheduling;
        let group_bytes = node.group().map_or(0, Bytes::get);
        let now = wire::Telemetry { group_bytes, ..wire_telemetry(seq, &snapshot, &host, scheduling) };
        telemetry.send_replace(Arc::new(now));
        tokio::time::sleep(MIN_GAP).await;
    }
}

fn wire_telemetry(seq: u64, snapshot: &NodeSnapshot, host: &Host, scheduling: Scheduling) -> wire::Telemetry {
    let (models, counts) = (host.models.borrow(), **host.counts.borrow());
    wire::Telemetry {
        epoch: 0,
        seq,
        gpus: snapshot.gpus.iter().map(gpu).collect(),
        queued: snapshot.queued,
        host_tier_bytes: models.iter().map(|model| model.bytes).sum(),
        host_models: models.to_vec(),
        scheduling: wire::NodeScheduling::from(scheduling).into(),
        host_budget_bytes: host.budget.get(),
        cold_starts: counts.cold_starts,
        host_evictions: counts.evictions,
        group_bytes: 0,
        policy: snapshot.policy.map(|policy| policy.wire()),
    }
}

fn gpu(gpu: &GpuSnapshot) -> wire::GpuTelemetry {
    let health = match gpu.health {
        GpuHealth::Starting => wire::GpuHealth::Starting,
        GpuHealth::Up => wire::GpuHealth::Up,
        GpuHealth::Restarting => wire::GpuHealth::Restarting,
        GpuHealth::Unhealthy => wire::GpuHealth::Unhealthy,
    };
    wire::GpuTelemetry {
        index: gpu.index.0,
        health: health.into(),
        memory_bytes: gpu.memory.get(),
        used_bytes: gpu.used.get(),
        models: gpu.models.iter().map(model).collect(),
        running: gpu.running.as_ref().map(ToString::to_string).unwrap_or_default(),
        incarnation: gpu.incarnation.0,
        executor_pid: gpu.executor_pid.unwrap_or_default(),
        executor_pids: gpu.executor_pids.clone(),
        restarts: gpu.restarts,
        swaps: gpu.swaps,
        peer_swaps: gpu.peer_swaps,
        evictions: gpu.evictions,
        busy_ns: u64::try_from(gpu.busy.as_nanos()).unwrap_or(u64::MAX),
        gpu_type: gpu.gpu_type.clone(),
        moved_bytes: gpu.moved.get(),
        object_bytes: gpu.data.used.get(),
        object_pool_bytes: gpu.data.pool.get(),
    }
}

fn model(model: &ResidentModel) -> wire::ResidentModel {
    wire::ResidentModel {
        functions: model.functions.iter().map(ToString::to_string).collect(),
        digest: model.digest.to_string(),
        bytes: model.bytes.get(),
        loaded_bytes: model.loaded.get(),
        idle: Some(duration_wire(model.idle)),
        executor_pid: model.executor_pid.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Bytes, Digest, GpuIndex, Incarnation};

    use super::*;

    #[test]
    fn says_what_the_snapshot_says() {
        let digest = Digest::of(b"m");
        let snapshot = NodeSnapshot {
            gpus: vec![GpuSnapshot {
                index: GpuIndex(1),
                gpu_type: "V100".into(),
                health: GpuHealth::Restarting,
                memory: Bytes(100),
                used: Bytes(10),
                models: vec![ResidentModel {
                    digest,
                    functions: Vec::new(),
                    bytes: Bytes(10),
                    loaded: Bytes(7),
                    idle: Duration::from_secs(3),
                    executor_pid: Some(9),
                }],
                running: None,
                incarnation: Incarnation(4),
                executor_pid: None,
                executor_pids: vec![8, 9],
                restarts: 3,
                swaps: 2,
                peer_swaps: 1,
                evictions: 1,
                busy: Duration::from_micros(5),
                moved: Bytes::ZERO,
                data: crate::snapshot::GpuData::default(),
            }],
            queued: 6,
            ..NodeSnapshot::default()
        };
        let models = vec![wire::HostModel { digest: digest.to_string(), bytes: 10 }];
        let counts = Counts { cold_starts: 4, evictions: 5 };
        let host = Host {
            budget: Bytes(20),
            models: watch::channel(Arc::new(models.clone())).1,
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
                running: String::new(),
                incarnation: 4,
                executor_pid: 0,
                executor_pids: vec![8, 9],
                restarts: 3,
                swaps: 2,
                peer_swaps: 1,
                evictions: 1,
                busy_ns: 5000,
                gpu_type: "V100".into(),
                moved_bytes: 0,
                object_bytes: 0,
                object_pool_bytes: 0,
            }],
            queued: 6,
            host_tier_bytes: 10,
            host_models: models,
            scheduling: wire::NodeScheduling::Cordoned.into(),
            host_budget_bytes: 20,
            cold_starts: 4,
            host_evictions: 5,
            group_bytes: 0,
            policy: None,
        };
        assert_eq!(wire_telemetry(9, &snapshot, &host, Scheduling::Cordoned), expected);
    }
}
