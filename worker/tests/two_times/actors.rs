//! The scenario under actix, in paused tokio time: the real actors, ports to modelled executors.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::{
    Digest, FunctionKey, FunctionName, RequestId, Revision, RevisionKey, Slo, TenantName, Timestamp,
};
use millrace_worker::clock::{Clock, VirtualClock};
use millrace_worker::handle::NodeHandle;
use millrace_worker::install::{FunctionConfig, PreparedModel};
use millrace_worker::node::{NodeConfig, NodeContext, SharedTrace, start_here};
use millrace_worker::port::Descriptor;
use millrace_worker::port::modelled::ModelledMachine;
use millrace_worker::request::Invocation;
use millrace_worker::snapshot::NodeSnapshot;

use crate::scenario::{Ending, FunctionModel, GPUS, Happening, Scenario};
use crate::{OBJECTIVE, Outcome};

pub(crate) fn run(scenario: &Scenario) -> (Outcome, NodeSnapshot) {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    actix::System::with_tokio_rt(runtime).block_on(drive(scenario.clone()))
}

async fn drive(scenario: Scenario) -> (Outcome, NodeSnapshot) {
    let clock: Arc<dyn Clock> = Arc::new(VirtualClock::start());
    let machine = ModelledMachine::new(Arc::clone(&clock), vec![scenario.behaviour(); GPUS as usize]);
    let trace = SharedTrace::default();
    let context = NodeContext::new(scenario.seed, Box::new(machine.clone()))
        .with_clock(Arc::clone(&clock))
        .with_trace(Arc::clone(&trace));
    let node = start_here(NodeConfig::new(scenario.topology.clone()), context);
    for (number, function) in scenario.functions.iter().enumerate() {
        let (config, model) = prepare(number, function);
        node.install(config, model).await.unwrap();
    }
    let mut clients = BTreeMap::new();
    let mut endings = BTreeMap::new();
    for &(at, happening) in &scenario.happenings {
        until(&*clock, at).await;
        match happening {
            Happening::Arrive { request, function, timeout } => {
                let node = node.clone();
                let client = async move { ask(&node, request, function, timeout).await };
                clients.insert(request, actix_rt::spawn(client));
            }
            Happening::Leave { request } => {
                if let Some(client) = clients.get(&request).filter(|client| !client.is_finished()) {
                    client.abort();
                    endings.insert(request, Ending::Cancelled);
                }
            }
            Happening::Kill(gpu) => machine.kill(gpu),
        }
    }
    until(&*clock, scenario.end).await;
    for (request, client) in clients {
        if let Ok(ending) = client.await {
            endings.insert(request, ending);
        }
    }
    let snapshot = node.snapshot().await;
    let folds = trace.lock().unwrap().folds().clone();
    (Outcome { folds, endings }, snapshot)
}

async fn until(clock: &dyn Clock, at: Timestamp) {
    tokio::time::sleep(clock.sleep_for(at.since(clock.now()))).await;
}

async fn ask(node: &NodeHandle, request: usize, function: usize, timeout: std::time::Duration) -> Ending {
    let invocation = Invocation {
        request_id: RequestId::new(&format!("request-{request}")).unwrap(),
        attempt: 1,
        attempts_left: 3,
        revision: revision(function),
        timeout,
        inputs: Vec::new(),
        descriptors: Vec::new(),
        outputs: Vec::new(),
    };
    match node.invoke(invocation).await {
        Ok(done) => Ending::Answered { gpu: done.gpu, attempts: done.attempts },
        Err(failure) => {
            Ending::Failed { reason: failure.reason, may_have_executed: failure.may_have_executed }
        }
    }
}

fn revision(function: usize) -> RevisionKey {
    let name = FunctionName::new(&format!("f{function}")).unwrap();
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

fn prepare(number: usize, function: &FunctionModel) -> (FunctionConfig, Arc<PreparedModel>) {
    let memfd = || -> Descriptor {
        Arc::new(rustix::fs::memfd_create("model", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    };
    let model = PreparedModel {
        digest: Digest::of(&[u8::try_from(number).unwrap()]),
        name: format!("model {number}"),
        graph: memfd(),
        graph_bytes: millrace_types::Bytes(0),
        weights: memfd(),
        weights_bytes: function.weights,
        launches: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
    };
    let config = FunctionConfig {
        key: revision(number),
        slo: Some(Slo { deadline: OBJECTIVE, percentile: 0.98 }),
        idempotent: function.idempotent,
        gpu_memory: None,
    };
    (config, Arc::new(model))
}
