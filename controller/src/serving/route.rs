//! What the router is told of each worker that is ready for a revision: telemetry says how soon it
//! would be done.

use std::sync::Arc;

use millrace_policy::router::{self, Candidate, Held, Request};
use millrace_types::{BytesPerSec, Digest};

use super::catalog::Candidates;
use crate::fleet::{Load, Worker};

/// How fast a model is taken to come onto a GPU: PCIe 3.0 ×16 in practice. Workers do not say, and
/// only how it compares with a run matters here.
const HOST_RATE: BytesPerSec = BytesPerSec::gb(12);

/// The worker for a request, among those that are ready for it and not `excluded`. While no GPU
/// serves anywhere, one that is about to.
pub(super) fn choose(
    candidates: &Candidates,
    request: &Request,
    excluded: impl Fn(&Worker) -> bool,
) -> Option<Arc<Worker>> {
    let digest = candidates.digest;
    let able = || candidates.workers.iter().filter(|worker| !excluded(worker));
    let serving = able().map(|worker| worker.with_load(|load| candidate(worker, load, digest)));
    let soon = || {
        able().map(|worker| {
            worker.with_load(|load| {
                let candidate = candidate(worker, load, digest);
                Candidate { gpus_up: load.gpus_coming, gpus_idle: 0, ..candidate }
            })
        })
    };
    router::choose(serving, request).or_else(|| router::choose(soon(), request)).cloned()
}

fn candidate<'a>(worker: &'a Arc<Worker>, load: &Load, digest: Digest) -> Candidate<&'a Arc<Worker>> {
    Candidate {
        worker,
        gpus_up: load.gpus_up,
        gpus_idle: load.gpus_idle,
        queued: load.queued,
        unseen: worker.unseen(),
        held: load.held.get(&digest).copied().unwrap_or(Held::InHost),
        host_rate: HOST_RATE,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use millrace_cluster_state::{Caller, Command, ControllerId, ModelSummary, Proposal, State, UnixMillis};
    use millrace_proto::convert::function_key;
    use millrace_proto::worker as wire;
    use millrace_types::{Bytes, ClusterId, Epoch, FunctionSpec, NodeName, Revision, RevisionKey, Timestamp};
    use tokio::time::Instant;

    use super::super::catalog::{Catalog, Sight};
    use super::*;
    use crate::connector::{Connector as _, Tcp};
    use crate::fleet::Fleet;
    use crate::leader::Outlook;

    const FUNCTIONS: usize = 1_000;
    const NODES: u64 = 100;
    const ROUNDS: usize = 200_000;

    fn digest(function: usize) -> Digest {
        Digest::of(&function.to_le_bytes())
    }

    fn key(function: usize) -> RevisionKey {
        let function = function_key("default", &format!("f{function}")).unwrap();
        RevisionKey { function, revision: Revision::new(1).unwrap() }
    }

    fn state() -> State {
        let mut state = State::default();
        let mut apply = |command| {
            let proposal =
                Proposal { stamp: UnixMillis(1), caller: Caller("test".into()), idempotency: None, command };
            state.apply(1, &proposal).unwrap();
        };
        apply(Command::InitCluster { cluster_id: ClusterId("c".into()) });
        for function in 0..FUNCTIONS {
            let model = ModelSummary {
                weights: Bytes::mib(100),
                parameters: 1,
                launches: 1,
                inputs: Vec::new(),
                outputs: Vec::new(),
            };
            let (digest, holder) = (digest(function), ControllerId(1));
            apply(Command::AddArtifact { digest, bytes: Bytes(1), model, holder });
            let spec = FunctionSpec::new(key(function).function);
            apply(Command::ApplyFunction { spec, digest, expected: None, voters: Vec::new() });
        }
        state
    }

    /// A node of 8 GPUs with ten models on each, ready for a share of the functions.
    fn worker(fleet: &Fleet, node: u64, replicas: usize) {
        let name = NodeName::new(&format!("n{node}")).unwrap();
        let calls = Tcp.connect(&name, "127.0.0.1:1").unwrap();
        let hello = wire::WorkerHello { instance: name.to_string(), ..Default::default() };
        let worker = Arc::new(Worker::new(name, hello, Epoch(node + 1), calls, Timestamp::ZERO));
        let share =
            |function: &usize| (0..replicas as u64).any(|copy| (*function as u64 + copy * 7) % NODES == node);
        let ready = |function: usize| wire::FunctionStatus {
            name: format!("f{function}"),
            revision: 1,
            phase: wire::FunctionPhase::Ready.into(),
            ..Default::default()
        };
        let functions = (0..FUNCTIONS).filter(share).map(ready).collect();
        worker.report_functions(wire::FunctionStatuses { functions });
        let gpu = |gpu: usize| wire::GpuTelemetry {
            health: wire::GpuHealth::Up.into(),
            models: (0..10)
                .map(|model| wire::ResidentModel {
                    digest: digest(gpu * 10 + model).to_string(),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        };
        worker.report(wire::Telemetry {
            epoch: node + 1,
            seq: 1,
            gpus: (0..8).map(gpu).collect(),
            ..Default::default()
        });
        fleet.attach(worker);
    }

    #[tokio::test]
    #[ignore = "prints what a decision costs; run it in release"]
    async fn what_a_decision_costs() {
        let state = state();
        let outlook = Outlook::of_a_follower();
        for replicas in [2, 100] {
            let fleet = Fleet::new();
            (0..NODES).for_each(|node| worker(&fleet, node, replicas));
            let catalog = Catalog::default();
            let sight = Sight { state: &state, fleet: &fleet, outlook: &outlook };
            let keys: Vec<_> = (0..FUNCTIONS).map(key).collect();
            let request = Request { weights: Bytes::mib(100), run: Duration::from_millis(4) };
            let decide = |key: &RevisionKey| {
                let candidates = catalog.candidates(&sight, key).unwrap();
                choose(&candidates, &request, |_| false).unwrap()
            };
            let mut chosen = BTreeMap::new();
            for key in &keys {
                *chosen.entry(decide(key).name.clone()).or_insert(0) += 1;
            }
            let began = Instant::now();
            for key in keys.iter().cycle().take(ROUNDS) {
                std::hint::black_box(decide(key));
            }
            let each = began.elapsed() / u32::try_from(ROUNDS).unwrap();
            println!(
                "{FUNCTIONS} functions, {NODES} nodes, {replicas} replicas: {each:?} a decision, {} nodes chosen",
                chosen.len()
            );
        }
    }
}
