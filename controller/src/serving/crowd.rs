//! A bench fixture: a gateway among many fake workers, to measure the cost of routing.

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{
    CallerName, ControllerId, ModelSummary, Proposal, State, StateCommand, UnixMillis,
};
use millrace_nodes::router::MachineRunTimes;
use millrace_proto::parts::PartAssembler;
use millrace_proto::worker as wire;
use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec, NodeName, Revision,
    RevisionKey, TenantName, Timestamp,
};

use super::catalog::{Catalog, CatalogInputs};
use super::route;
use crate::connector::{Connector as _, Tcp};
use crate::fleet::{AttachedWorker, WorkerFleet};
use crate::leadership::LeaderStatus;

/// GPUs of a node; [`MODELS_PER_GPU`] is the number of models on each.
const GPUS: usize = 8;
const MODELS_PER_GPU: usize = 10;
const RUN: Duration = Duration::from_millis(4);
const WEIGHTS: Bytes = Bytes::mib(100);

/// Functions on nodes, and a gateway's knowledge of both.
#[derive(Debug)]
pub struct RoutingFixture {
    state: State,
    fleet: WorkerFleet,
    outlook: LeaderStatus,
    catalog: Catalog,
    runs: MachineRunTimes,
    keys: Vec<RevisionKey>,
}

impl RoutingFixture {
    /// Returns a fixture with `functions` functions, each ready on `replicas` of the nodes. Must be
    /// called within a tokio runtime.
    ///
    /// # Panics
    /// `nodes` is zero.
    #[must_use]
    pub fn new(functions: usize, nodes: u64, replicas: u64) -> Self {
        let keys: Vec<_> = (0..functions).map(key).collect();
        let fleet = WorkerFleet::new();
        for node in 0..nodes {
            let share = (0..functions)
                .filter(|&function| (0..replicas).any(|copy| (function as u64 + copy * 7) % nodes == node));
            fleet.attach(worker(node, share));
        }
        let outlook = LeaderStatus::of_a_follower();
        let catalog = Catalog::default();
        // Give every worker an estimate, as if a run had finished on each.
        let mut runs = MachineRunTimes::default();
        fleet.workers().values().for_each(|worker| runs.record_run(&worker.machine, RUN));
        Self { state: state(&keys), fleet, outlook, catalog, runs, keys }
    }

    /// Returns the node for a request of a function; `None` if the function is ready on no node.
    #[must_use]
    pub fn route(&self, function: usize) -> Option<NodeName> {
        let sight = CatalogInputs { state: &self.state, fleet: &self.fleet, outlook: &self.outlook };
        let candidates = self.catalog.candidates(&sight, self.keys.get(function)?)?;
        let chosen = route::choose(&candidates, &self.runs, |_| Bytes::ZERO, |_| false);
        chosen.map(|worker| worker.name.clone())
    }
}

fn digest(function: usize) -> Digest {
    Digest::of(&function.to_le_bytes())
}

fn key(function: usize) -> RevisionKey {
    let name = FunctionName::new(&format!("f{function}")).expect("a name");
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

fn state(keys: &[RevisionKey]) -> State {
    let mut state = State::default();
    let mut apply = |command| {
        let caller = CallerName("crowd".into());
        let proposal = Proposal { stamp: UnixMillis(1), caller, idempotency: None, command };
        state.apply(1, &proposal).expect("the crowd is in range");
    };
    apply(StateCommand::InitCluster { cluster_id: ClusterId("crowd".into()) });
    for (function, key) in keys.iter().enumerate() {
        let weights = WEIGHTS;
        let inputs = Vec::new();
        let outputs = Vec::new();
        let model = ModelSummary { weights, parameters: 1, launches: 1, inputs, outputs };
        let digest = digest(function);
        let holder = ControllerId(1);
        apply(StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder });
        let spec = FunctionSpec::new(key.function.clone());
        apply(StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() });
    }
    state
}

fn worker(node: u64, ready: impl Iterator<Item = usize>) -> Arc<AttachedWorker> {
    let name = NodeName::new(&format!("n{node}")).expect("a name");
    let calls = Tcp.connect(&name, "127.0.0.1:1").expect("the address is valid");
    let hello = wire::WorkerHello { instance: name.to_string(), ..Default::default() };
    let worker = Arc::new(AttachedWorker::new(name, hello, Epoch(node + 1), calls, Timestamp::ZERO));
    let ready = ready.map(|function| wire::FunctionStatus {
        name: format!("f{function}"),
        revision: 1,
        phase: wire::FunctionPhase::Ready.into(),
        ..Default::default()
    });
    let statuses = wire::FunctionStatuses { functions: ready.collect(), ..Default::default() };
    let whole = PartAssembler::default().take(statuses).expect("a whole set").expect("a whole set");
    worker.report_functions(whole).expect("at most as many functions as a node may have");
    let model =
        |model: usize| wire::ResidentModel { digest: digest(model).to_string(), ..Default::default() };
    let gpu = |gpu: usize| wire::GpuTelemetry {
        health: wire::GpuHealth::Up.into(),
        models: (0..MODELS_PER_GPU).map(|place| model(gpu * MODELS_PER_GPU + place)).collect(),
        ..Default::default()
    };
    let gpus = (0..GPUS).map(gpu).collect();
    worker.report(wire::Telemetry { epoch: node + 1, seq: 1, gpus, ..Default::default() });
    worker
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_function_is_routed_to_a_node_that_is_ready_for_it() {
        let crowd = RoutingFixture::new(40, 20, 2);
        for function in 0..40u64 {
            let chosen = crowd.route(function as usize).unwrap();
            let ready = [function % 20, (function + 7) % 20].map(|node| format!("n{node}"));
            assert!(ready.iter().any(|name| name == chosen.as_str()), "{function} goes to {chosen}");
        }
        assert_eq!(crowd.route(40), None);
    }
}
