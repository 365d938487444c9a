//! The control plane's metrics on `/metrics`, read at each scrape, so that no request pays for
//! counting. A worker exports the counters of the local GPUs (swaps, restarts): a sum here would jump
//! whenever a worker attaches or detaches.

use millrace_cluster_state::NodeStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::fleet::WorkerFleet;
use crate::leadership::LeaderStatus;
use crate::raft::Replica;

#[derive(Debug)]
struct ControlPlane {
    replica: Replica,
    fleet: WorkerFleet,
    outlook: LeaderStatus,
}

/// Returns a registry with the control plane's metrics.
pub(crate) fn registry(replica: Replica, fleet: WorkerFleet, outlook: LeaderStatus) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(ControlPlane { replica, fleet, outlook }));
    registry
}

impl Collector for ControlPlane {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let state = self.replica.state();
        let telemetry: Vec<_> =
            self.fleet.workers().values().filter_map(|worker| worker.telemetry()).collect();
        let gpus = || telemetry.iter().flat_map(|report| &report.gpus);
        let nodes = |status| state.nodes().filter(|node| node.status == status).count();
        let checkpoints = || state.checkpoints().map(|(_, checkpoint)| checkpoint);
        let leads = i64::from(self.replica.leading_term().is_some());
        for (name, help, value) in [
            ("millrace_functions", "Functions applied", signed(state.functions_len())),
            ("millrace_artifacts", "Model files recorded", signed(state.artifacts_len())),
            (
                "millrace_workers_attached",
                "Workers with a stream to this controller",
                signed(self.fleet.workers().len()),
            ),
            ("millrace_gpus_reported", "GPUs of the attached workers", signed(gpus().count())),
            (
                "millrace_gpu_memory_used_bytes",
                "GPU memory in use on the attached workers",
                gpus().map(|gpu| gpu.used_bytes.cast_signed()).sum(),
            ),
            (
                "millrace_worker_queued",
                "Requests in the attached workers' queues",
                telemetry.iter().map(|report| i64::from(report.queued)).sum(),
            ),
            (
                "millrace_raft_term",
                "The term this controller is in; it grows with every election",
                self.replica.term().cast_signed(),
            ),
            ("millrace_raft_leads", "1 while this controller leads", leads),
            ("millrace_nodes", "Nodes believed alive", signed(nodes(NodeStatus::Live))),
            (
                "millrace_nodes_needed",
                "Nodes the cluster should have, for a node autoscaler",
                self.outlook.signal().map_or(0, |signal| signal.nodes_needed.into()),
            ),
            ("millrace_nodes_lost", "Nodes that are lost and not removed", signed(nodes(NodeStatus::Lost))),
            (
                "millrace_placements",
                "Copies of functions that nodes are to hold in host memory",
                signed(state.placements_len()),
            ),
            (
                "millrace_functions_short",
                "Functions with fewer copies than they ask for, and no node that takes one",
                signed(self.outlook.shortages().len()),
            ),
            ("millrace_index_entries", "Pieces of data that nodes hold", signed(state.index_held_len())),
            (
                "millrace_index_lost_entries",
                "Pieces of data remembered as lost",
                signed(state.index_lost_len()),
            ),
            (
                "millrace_index_overflow",
                "Pieces of data held by nodes beyond the limit of index entries",
                checkpoints().map(|it| unsigned(it.overflow.saturating_add(it.dropped))).sum(),
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (name, help, value) in [
            (
                "millrace_raft_applied_index",
                "The log entry this controller's state is at",
                state.applied_index(),
            ),
            ("millrace_state_changes", "Changes of the replicated state", state.version()),
            ("millrace_checkpoints", "Checkpoints of nodes that were committed", state.synced()),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn unsigned(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
