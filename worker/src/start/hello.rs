//! The greeting with which a worker registers at each controller.

use std::net::SocketAddr;

use millrace_proto::worker as wire;

use super::config::WorkerConfig;
use crate::clock::{Clock as _, MonotonicClock};

pub(super) fn hello(config: &WorkerConfig, addr: SocketAddr) -> wire::WorkerHello {
    let gpu = |gpu: &millrace_types::topology::TopologyGpu| wire::GpuCapacity {
        index: gpu.index.0,
        gpu_type: gpu.gpu_type.clone(),
        memory_bytes: gpu.memory.get(),
    };
    wire::WorkerHello {
        node: config.node.to_string(),
        instance: instance(),
        address: config.advertise.clone().unwrap_or_else(|| addr.to_string()),
        gpus: config.topology.gpus.iter().map(gpu).collect(),
        host_memory_bytes: config.host_memory.max(config.model_storage).get(),
        topology: config.topology.name.clone(),
        runs_programs: config.programs.is_some(),
        ..Default::default()
    }
}

/// Returns an identifier that distinguishes this process from another that claims the same node. A
/// pid and a start time never repeat together within one boot of a machine, and the lock keeps its
/// data directory apart.
fn instance() -> String {
    format!("{}-{}", std::process::id(), MonotonicClock.now().as_nanos())
}
