//! The workers, their GPUs and resident models. Also passes fault injection on to a worker.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_cluster_state::{NodeRecord, NodeStatus, SchedulingState, State};
use millrace_nodes::lease::LeaseState;
use millrace_proto::admin as api;
use millrace_proto::convert::duration_wire;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::{Alpha, Alphas, Failure, NodeName, Reason};
use tonic::Request;

use super::listing::{fill, page_size_or_all};
use super::masks::ResponseMask;
use super::views::condition;
use super::{AdminService, FaultPermission, node_name, unknown_token};

impl AdminService {
    pub(super) async fn list_nodes(
        &self,
        request: api::ListNodesRequest,
    ) -> Result<api::ListNodesResponse, Failure> {
        let consistency = request.consistency();
        let size = page_size_or_all(request.page_size);
        let after = match request.page_token.as_str() {
            "" => None,
            token => Some(NodeName::new(token).map_err(|_| Failure::malformed(unknown_token(token)))?),
        };
        let mask = ResponseMask::read(request.read_mask, "Node")?;
        let state = self.read(consistency).await?;
        let rest = state.nodes().filter(|node| after.as_ref().is_none_or(|after| node.name > *after));
        let (nodes, last) = fill(rest, size, |node| mask.cut(self.node(&state, node)));
        let next_page_token = last.map(|node| node.name.to_string()).unwrap_or_default();
        Ok(api::ListNodesResponse { nodes, next_page_token })
    }

    /// Returns a node from the state, combined with the last report.
    pub(super) fn node(&self, state: &State, node: &NodeRecord) -> api::Node {
        // Ignore a stream with another epoch: such a stream is about to get this epoch, or to end.
        let worker = self.fleet.worker(&node.name).filter(|worker| worker.epoch() == node.epoch);
        let telemetry = worker.as_ref().and_then(|worker| worker.telemetry());
        let lease = match self.outlook.lease_state(&node.name) {
            LeaseState::Believed => api::NodeLease::Believed,
            LeaseState::Fenced => api::NodeLease::Fenced,
            LeaseState::Lost | LeaseState::Unknown => api::NodeLease::Unspecified,
        };
        let stream_break = worker.as_ref().and_then(|it| it.stream_break(self.fleet.now()));
        let connected = worker.is_some() && stream_break.is_none();
        let checkpoint = state.checkpoint(&node.name);
        let placements = state.placements_on(&node.name).count();
        api::Node {
            placements: u32::try_from(placements).unwrap_or(u32::MAX),
            lease: lease.into(),
            operation: state.drain_of(&node.name).map(|it| it.id.to_string()).unwrap_or_default(),
            checkpoint_seq: checkpoint.map_or(0, |it| it.seq),
            alphas: checkpoint.map(|it| alphas(&it.alphas)).unwrap_or_default(),
            index_entries: checkpoint.map_or(0, |it| it.entries.len() as u64),
            index_overflow: checkpoint.map_or(0, |it| it.overflow.saturating_add(it.dropped)),
            conditions: vec![stream_condition(worker.is_some(), stream_break)],
            ..view(node, connected, telemetry.as_deref())
        }
    }

    pub(super) async fn inject_fault(
        &self,
        request: api::InjectFaultRequest,
    ) -> Result<api::InjectFaultResponse, Failure> {
        if self.faults == FaultPermission::Refused {
            let message = "faults are not allowed here: start the server with --allow faults";
            return Err(Failure::new(Reason::PermissionDenied, message));
        }
        let name = node_name(&request.node)?;
        let worker = self.fleet.worker(&name).ok_or_else(|| {
            Failure::new(
                Reason::NoWorker,
                format!("no worker {name} is attached: list them with 'millrace ps'"),
            )
        })?;
        let fault = u32::try_from(request.fault).map_err(|_| {
            let message =
                format!("there is no fault {}: name one of InjectFaultRequest.Fault", request.fault);
            Failure::malformed(message)
        })?;
        let fault = wire::InjectFaultRequest { gpu: request.gpu, fault, function: request.function };
        worker.calls.inject_fault(Request::new(fault)).await.map_err(|status| from_status(&status))?;
        Ok(api::InjectFaultResponse {})
    }
}

/// Converts alphas to shares by the number of their priority.
fn alphas(alphas: &Alphas) -> BTreeMap<u32, f64> {
    let share = |alpha: Alpha| f64::from(alpha.ppm()) / f64::from(Alpha::ONE.ppm());
    alphas.iter().map(|(level, &alpha)| (level.get().into(), share(alpha))).collect()
}

/// Returns the condition "Stream": whether this controller has a stable stream of the node.
fn stream_condition(attached: bool, stream_break: Option<&wire::StreamBreak>) -> api::Condition {
    match stream_break {
        Some(wire::StreamBreak { times, why }) => {
            let message =
                format!("the node's stream broke {times} times in a row, the last time because: {why}");
            condition("Stream", false, "StreamBreaks", message)
        }
        None if attached => condition("Stream", true, "Attached", "the node's stream is stable".to_owned()),
        None => {
            let message = "this controller has no stream of the node: see the worker's log for the reason";
            condition("Stream", false, "Detached", message.to_owned())
        }
    }
}

/// Converts the node's record and report.
fn view(node: &NodeRecord, connected: bool, telemetry: Option<&wire::Telemetry>) -> api::Node {
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
        host_budget_bytes: telemetry.map_or(0, |telemetry| telemetry.host_budget_bytes),
        cold_starts: telemetry.map_or(0, |telemetry| telemetry.cold_starts),
        host_evictions: telemetry.map_or(0, |telemetry| telemetry.host_evictions),
        host_models: telemetry.iter().flat_map(|it| &it.host_models).map(|it| it.digest.clone()).collect(),
        host_models_left_out: telemetry.map_or(0, |telemetry| telemetry.host_models_left_out),
        group_bytes: telemetry.map_or(0, |telemetry| telemetry.group_bytes),
        queued: telemetry.map_or(0, |telemetry| telemetry.queued),
        policy: telemetry.and_then(|telemetry| telemetry.policy.as_ref()?.spec.clone()),
        status: match node.status {
            NodeStatus::Live => api::NodeStatus::Live,
            NodeStatus::Lost => api::NodeStatus::Lost,
        }
        .into(),
        scheduling: match node.scheduling {
            SchedulingState::Schedulable => api::NodeScheduling::Schedulable,
            SchedulingState::Cordoned => api::NodeScheduling::Cordoned,
            SchedulingState::Draining => api::NodeScheduling::Draining,
        }
        .into(),
        ..api::Node::default()
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
        models_left_out: gpu.models_left_out,
        running: gpu.running.iter().map(running).collect(),
        sm_violations: gpu.sm_violations,
        executor_pid: gpu.executor_pid,
        executor_pids: gpu.executor_pids.clone(),
        restarts: gpu.restarts,
        swaps: gpu.swaps,
        peer_swaps: gpu.peer_swaps,
        evictions: gpu.evictions,
        busy: Some(duration_wire(Duration::from_nanos(gpu.busy_ns))),
    }
}

fn running(running: &wire::RunningRequest) -> api::RunningRequest {
    let wire::RunningRequest { function, first_unit, units } = running.clone();
    api::RunningRequest { function, first_unit, units }
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
        executor_pid: model.executor_pid,
    }
}
