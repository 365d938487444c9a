//! The workers, their GPUs and what is resident on them; and fault injection, which is passed on
//! to one of them.

use std::time::Duration;

use millrace_cluster_state::Node;
use millrace_proto::admin as api;
use millrace_proto::convert::duration_wire;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::{Failure, NodeName, Reason};

use super::{AdminService, Faults};

impl AdminService {
    pub(super) async fn list_nodes(&self) -> Result<api::ListNodesResponse, Failure> {
        let state = self.replica.linearizable().await?;
        let workers = self.fleet.workers();
        let view = |node: &Node| {
            // A stream under an older epoch is about to end.
            let worker = workers.get(&node.name).filter(|worker| worker.epoch == node.epoch);
            let telemetry = worker.and_then(|worker| worker.telemetry());
            view(node, worker.is_some(), telemetry.as_deref())
        };
        Ok(api::ListNodesResponse { nodes: state.nodes().map(|node| view(node)).collect() })
    }

    pub(super) async fn inject_fault(
        &self,
        request: api::InjectFaultRequest,
    ) -> Result<api::InjectFaultResponse, Failure> {
        if self.faults == Faults::Refused {
            let message = "faults are not allowed here: start the server with --allow-faults";
            return Err(Failure::new(Reason::PermissionDenied, message));
        }
        let invalid =
            |error: millrace_types::ids::NameError| Failure::new(Reason::InvalidSpec, error.to_string());
        let name = NodeName::new(&request.node).map_err(invalid)?;
        let worker = self.fleet.worker(&name).ok_or_else(|| {
            Failure::new(
                Reason::NoWorker,
                format!("no worker {name} is attached: list them with 'millrace ps'"),
            )
        })?;
        let fault = wire::InjectFaultRequest {
            gpu: request.gpu,
            fault: request.fault.unsigned_abs(),
            function: request.function,
        };
        worker.client.clone().inject_fault(fault).await.map_err(|status| from_status(&status))?;
        Ok(api::InjectFaultResponse {})
    }
}

/// A node as the state knows it, and as it last reported itself.
fn view(node: &Node, connected: bool, telemetry: Option<&wire::Telemetry>) -> api::Node {
    let gpus = match telemetry {
        Some(telemetry) => telemetry.gpus.iter().map(live_gpu).collect(),
        None => node.gpus.iter().map(silent_gpu).collect(),
    };
    api::Node {
        name: node.name.to_string(),
        epoch: node.epoch.0,
        address: node.address.clone(),
        connected,
        topology: node.topology.clone(),
        gpus,
        host_memory_bytes: node.host_memory.get(),
        host_tier_bytes: telemetry.map_or(0, |telemetry| telemetry.host_tier_bytes),
        queued: telemetry.map_or(0, |telemetry| telemetry.queued),
    }
}

fn silent_gpu(gpu: &millrace_cluster_state::NodeGpu) -> api::Gpu {
    api::Gpu {
        index: gpu.index.0,
        gpu_type: gpu.gpu_type.clone(),
        health: "Unknown".into(),
        memory_bytes: gpu.memory.get(),
        ..api::Gpu::default()
    }
}

fn live_gpu(gpu: &wire::GpuTelemetry) -> api::Gpu {
    api::Gpu {
        index: gpu.index,
        gpu_type: gpu.gpu_type.clone(),
        health: health(gpu.health()).into(),
        memory_bytes: gpu.memory_bytes,
        used_bytes: gpu.used_bytes,
        models: gpu.models.iter().map(resident).collect(),
        running: gpu.running.clone(),
        executor_pid: gpu.executor_pid,
        restarts: gpu.restarts,
        swaps: gpu.swaps,
        evictions: gpu.evictions,
        busy: Some(duration_wire(Duration::from_nanos(gpu.busy_ns))),
    }
}

fn health(health: wire::GpuHealth) -> &'static str {
    match health {
        wire::GpuHealth::Unspecified => "Unknown",
        wire::GpuHealth::Starting => "Starting",
        wire::GpuHealth::Up => "Up",
        wire::GpuHealth::Restarting => "Restarting",
        wire::GpuHealth::Unhealthy => "Unhealthy",
    }
}

fn resident(model: &wire::ResidentModel) -> api::ResidentModel {
    api::ResidentModel {
        functions: model.functions.clone(),
        digest: model.digest.clone(),
        bytes: model.bytes,
        loaded_bytes: model.loaded_bytes,
        idle: model.idle,
    }
}
