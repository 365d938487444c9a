//! Runs the scenario under actix, in paused tokio time: the real actors, with ports to modelled
//! executors.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_worker::install::FunctionConfig;
use millrace_worker::node::NodeConfig;
use millrace_worker::snapshot::NodeSnapshot;

use crate::scenario::{Ending, Scenario, ScenarioEvent};
use crate::two_times::Outcome;
use crate::world::{Answer, World, function, in_virtual_time, prepare, request};

pub(crate) fn run(scenario: &Scenario) -> (Outcome, NodeSnapshot) {
    in_virtual_time(drive(scenario))
}

async fn drive(scenario: &Scenario) -> (Outcome, NodeSnapshot) {
    let config = NodeConfig {
        dispatch: scenario.dispatch,
        eviction: scenario.eviction,
        sharing: scenario.sharing,
        gpu_sharing: scenario.gpu_sharing,
        ..NodeConfig::new(scenario.topology.clone())
    };
    let world = World::start_with(config, &scenario.behaviour(), scenario.seed, |machine| Box::new(machine));
    for (number, model) in scenario.functions.iter().enumerate() {
        let config = FunctionConfig { idempotent: model.idempotent, ..function(number) };
        world.node.install(config, prepare(number, model.weights)).await.unwrap();
    }
    let mut clients = BTreeMap::new();
    let mut endings = BTreeMap::new();
    for &(at, happening) in &scenario.happenings {
        world.until(at).await;
        match happening {
            ScenarioEvent::Arrive { request: number, function, timeout } => {
                clients.insert(number, ask(&world, function, timeout));
            }
            ScenarioEvent::Leave { request } => {
                if let Some(client) = clients.get(&request).filter(|client| !client.is_finished()) {
                    client.abort();
                    endings.insert(request, Ending::Cancelled);
                }
            }
            ScenarioEvent::Kill(gpu) => world.machine.kill(gpu),
        }
    }
    world.until(scenario.end).await;
    for (request, client) in clients {
        if let Ok(answer) = client.await {
            endings.insert(request, ending(&answer));
        }
    }
    let snapshot = world.node.snapshot().await;
    let folds = world.trace.lock().unwrap().folds().clone();
    (Outcome { folds, endings }, snapshot)
}

fn ask(world: &World, function: usize, timeout: Duration) -> tokio::task::JoinHandle<Answer> {
    let mut invocation = request(function);
    invocation.timeout = timeout;
    world.ask(invocation)
}

fn ending(answer: &Answer) -> Ending {
    match answer {
        Ok(done) => Ending::Answered { gpu: done.gpu.unwrap(), attempts: done.attempts },
        Err(failure) => {
            Ending::Failed { reason: failure.reason, may_have_executed: failure.may_have_executed }
        }
    }
}
