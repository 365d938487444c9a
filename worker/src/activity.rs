//! The activity of this worker's functions and links, for `millrace top`. Like the metrics, the
//! activity is computed on request of a controller.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::activity::{Activity, FunctionActivity, LinkActivity};
use millrace_proto::parts::bound_activity;
use millrace_scheduling::admission::FunctionTotals;
use millrace_types::topology::Topology;
use millrace_types::{FunctionKey, NodeName};

use crate::snapshot::{LinkSnapshot, NodeSnapshot};

/// The identity and the hardware of the worker that an activity report describes.
#[derive(Debug, Clone)]
pub(crate) struct WorkerIdentity {
    pub(crate) node: NodeName,
    /// Identifier of this worker process. A later process of the same node has another identifier.
    pub(crate) instance: String,
    pub(crate) topology: Arc<Topology>,
}

impl WorkerIdentity {
    /// Returns the counts of a tenant's functions, or of all functions if `tenant` is empty.
    /// Functions without requests so far are omitted.
    pub(crate) fn activity(&self, snapshot: &NodeSnapshot, tenant: &str) -> Activity {
        let scores = snapshot.scores().into_iter();
        let idle = |(score, in_flight): &(FunctionTotals, u32)| {
            *score == FunctionTotals::default() && *in_flight == 0
        };
        let active = scores.filter(|(_, counted)| !idle(counted));
        let mut activity = Activity {
            functions: active.map(|(key, (score, in_flight))| function(key, score, in_flight)).collect(),
            links: snapshot.links.iter().map(|link| self.link(link)).collect(),
            processes: vec![format!("worker/{}/{}", self.node, self.instance)],
            ..Activity::default()
        };
        bound_activity(&mut activity, tenant);
        activity
    }

    fn link(&self, link: &LinkSnapshot) -> LinkActivity {
        LinkActivity {
            node: self.node.to_string(),
            link: link.link.0,
            name: self.topology.link_name(link.link),
            bytes_per_second: link.rate.0,
            measured_bytes_per_second: link.measured.map_or(0, |rate| rate.0),
            carried_bytes: link.carried.get(),
            outstanding: link.outstanding,
            measured_to_host_bytes_per_second: link.measured_to_host.map_or(0, |rate| rate.0),
            carried_to_host_bytes: link.carried_to_host.get(),
        }
    }
}

fn function(key: &FunctionKey, score: FunctionTotals, in_flight: u32) -> FunctionActivity {
    FunctionActivity {
        tenant: key.tenant.to_string(),
        function: key.name.to_string(),
        in_flight,
        slo_requests: score.scored,
        slo_in_time: score.in_time,
        gpu_time: Duration::from_millis(score.billed_ms).try_into().ok(),
        // The gateways count responses and their latency.
        ..FunctionActivity::default()
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::topology::{LinkId, LinkKind, TopologyGpu, TopologyLink};
    use millrace_types::{Bytes, BytesPerSec, GpuIndex, Revision, RevisionKey};

    use super::*;
    use crate::snapshot::FunctionSnapshot;

    fn place() -> WorkerIdentity {
        let gpu = |index, path: &[u32]| TopologyGpu {
            index: GpuIndex(index),
            gpu_type: "V100".into(),
            memory: Bytes(1),
            host_path: path.iter().copied().map(LinkId).collect(),
        };
        let link = |kind| TopologyLink { kind, rate: BytesPerSec(12) };
        let nvlink = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(1) };
        let topology = Topology {
            name: "pair".into(),
            gpus: vec![gpu(0, &[0, 2]), gpu(1, &[1, 2])],
            links: [LinkKind::Pcie, LinkKind::Pcie, LinkKind::PcieUplink, nvlink].map(link).into(),
        };
        WorkerIdentity {
            node: NodeName::new("n0").unwrap(),
            instance: "i".into(),
            topology: Arc::new(topology),
        }
    }

    #[test]
    fn links_are_named_by_the_gpus_they_join() {
        let links = (0..5).map(|i| LinkSnapshot {
            link: LinkId(i),
            rate: BytesPerSec(12),
            measured: None,
            carried: Bytes(7),
            measured_to_host: None,
            carried_to_host: Bytes(5),
            outstanding: 1,
        });
        let snapshot = NodeSnapshot { links: links.collect(), ..NodeSnapshot::default() };
        let told = place().activity(&snapshot, "").links;
        let names: Vec<_> = told.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["pcie 0", "pcie 1", "uplink 0,1", "nvlink 0-1", "link 4"]);
        assert_eq!((told[0].carried_bytes, told[0].measured_bytes_per_second), (7, 0));
        assert_eq!((told[0].carried_to_host_bytes, told[0].measured_to_host_bytes_per_second), (5, 0));
    }

    #[test]
    fn revisions_of_a_function_are_summed_and_idle_functions_are_omitted() {
        let key = |name: &str| FunctionKey {
            tenant: millrace_types::TenantName::default(),
            name: millrace_types::FunctionName::new(name).unwrap(),
        };
        let function = |name: &str, revision, completed| FunctionSnapshot {
            key: RevisionKey { function: key(name), revision: Revision::new(revision).unwrap() },
            in_flight: u32::try_from(completed).unwrap(),
            score: FunctionTotals {
                completed,
                in_time: completed,
                scored: completed,
                billed_ms: completed,
                ..FunctionTotals::default()
            },
        };
        let past = FunctionTotals { completed: 5, scored: 5, billed_ms: 1500, ..FunctionTotals::default() };
        let snapshot = NodeSnapshot {
            functions: vec![function("a", 1, 1), function("a", 2, 2), function("idle", 1, 0)],
            past: [(key("a"), past)].into(),
            ..NodeSnapshot::default()
        };
        let told = place().activity(&snapshot, "").functions;
        let [a] = told.as_slice() else { panic!("{told:?}") };
        assert_eq!((a.function.as_str(), a.in_flight, a.slo_requests, a.slo_in_time), ("a", 3, 8, 3));
        let gpu_time: Duration = a.gpu_time.unwrap().try_into().unwrap();
        assert_eq!(gpu_time, Duration::from_millis(1503));
    }
}
