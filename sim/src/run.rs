//! Runs a scenario: starts the nodes in virtual time, installs each function on the nodes that the control
//! plane chose, injects the requests and the faults, and waits until every request has ended.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use millrace_nodes::router::RouteRequest;
use millrace_types::{Digest, GpuIndex, Reason, RequestId, RevisionKey, Timestamp};
use millrace_worker::clock::{Clock, Sleeper, VirtualClock};
use millrace_worker::install::InstallError;
use millrace_worker::port::modelled;
use millrace_worker::request::{Attempt, OnGpus};
use millrace_worker::snapshot::{NodeSnapshot, SnapshotScope};
use tokio::sync::Notify;

use crate::control::{self, SimulatedControlPlane, digest};
use crate::machine::{self, SimulatedMachine};
use crate::outcome::{RequestEnding, SimulatedRequest, SimulationOutcome};
use crate::router::{SimulatedRouter, TELEMETRY_EVERY};
use crate::scenario::{ClusterScenario, SimulatedFunction};

/// The virtual time before the first request in which executors start.
const WARM_UP: Duration = Duration::from_secs(1);
/// The least interval between samples of the number of GPUs that hold the most popular model.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The most samples of a run. In a longer run the interval between samples grows.
const LOOKS_MAX: u32 = 10_000;

/// A reason that a scenario was not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The control plane refused the scenario.
    #[error(transparent)]
    Control(#[from] control::Error),
    /// A node refused a function.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// The scenario contradicts itself.
    #[error("the scenario contradicts itself: {0}")]
    Scenario(String),
    /// The operating system refused the memfd that stands for the models.
    #[error("cannot create a memfd for the models: {0}")]
    Memory(#[from] std::io::Error),
}

/// Runs a scenario to its end on this thread, which must not run an async runtime already.
///
/// # Errors
/// Returns [`Error`] if the scenario contradicts itself, or the control plane or a node refuses a part of it.
pub fn run(scenario: &ClusterScenario) -> Result<SimulationOutcome, Error> {
    check(scenario)?;
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let built = builder.enable_time().start_paused(true).build();
        built.unwrap_or_else(|error| panic!("cannot build a runtime without I/O: {error}"))
    };
    actix::System::with_tokio_rt(runtime).block_on(SimulatedCluster::run(scenario))
}

/// Runs scenarios, as many at once as there are processors, and reduces each outcome with `take`. Each
/// scenario has its own virtual time. Returns the results in the order of the scenarios.
///
/// # Errors
/// Returns the error of the first scenario that was not run.
pub fn run_each<T: Send + Sync>(
    scenarios: &[ClusterScenario],
    take: impl Fn(&ClusterScenario, SimulationOutcome) -> T + Sync,
) -> Result<Vec<T>, Error> {
    let next = AtomicUsize::new(0);
    let results: Vec<OnceLock<Result<T, Error>>> = scenarios.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        while let Some((scenario, result)) = {
            let place = next.fetch_add(1, Ordering::Relaxed);
            scenarios.get(place).zip(results.get(place))
        } {
            result.get_or_init(|| run(scenario).map(|outcome| take(scenario, outcome)));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(scenarios.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    // The scope ends only after a thread ran every scenario, so every cell has a result.
    results
        .into_iter()
        .map(|result| result.into_inner().unwrap_or_else(|| unreachable!("every scenario was run")))
        .collect()
}

fn check(scenario: &ClusterScenario) -> Result<(), Error> {
    let wrong = |what: String| Err(Error::Scenario(what));
    if scenario.nodes.is_empty() {
        return wrong("the list of nodes is empty".to_owned());
    }
    let functions = scenario.functions.len();
    if let Some(arrival) = scenario.arrivals.iter().find(|arrival| arrival.function as usize >= functions) {
        return wrong(format!("a request is for function {} of {functions}", arrival.function));
    }
    if !scenario.arrivals.is_sorted_by_key(|arrival| arrival.at) {
        return wrong("the arrivals are not sorted by time".to_owned());
    }
    let there = |node: usize, gpu: GpuIndex| {
        scenario.nodes.get(node).is_some_and(|it| it.topology.gpus.len() > gpu.0 as usize)
    };
    if let Some(fault) = scenario.faults.iter().find(|fault| !there(fault.node, fault.gpu)) {
        return wrong(format!("a fault is for node {} GPU {}, which does not exist", fault.node, fault.gpu));
    }
    Ok(())
}

/// The state that the tasks of a run share.
struct RunContext {
    clock: Arc<dyn Clock>,
    machines: Vec<SimulatedMachine>,
    router: RefCell<SimulatedRouter>,
    records: RefCell<Vec<SimulatedRequest>>,
    /// The number of GPUs that held the most popular model, added up over the samples, and the number of
    /// samples.
    held: RefCell<(u64, u64)>,
    answered: Notify,
    timeout: Duration,
    requests: Vec<(RevisionKey, Digest, RouteRequest)>,
    /// Whether each function's requests carry a row, so that several requests may run as a batch.
    rows: Vec<bool>,
}

struct SimulatedCluster;

impl SimulatedCluster {
    async fn run(scenario: &ClusterScenario) -> Result<SimulationOutcome, Error> {
        let (control, placed) = SimulatedControlPlane::set_up(scenario)?;
        let clock: Arc<dyn Clock> =
            Arc::new(VirtualClock::starting_at(tokio::time::Instant::now()).with_ties(scenario.ties));
        let mut router = SimulatedRouter::default();
        let models = machine::models(&scenario.functions)?;
        let mut machines = Vec::new();
        for (place, (node, functions)) in scenario.nodes.iter().zip(&placed).enumerate() {
            let machine = SimulatedMachine::start(scenario, node, place, &clock);
            router.add_node(place, &node.topology);
            for &function in functions {
                let config = machine.config(scenario, node, function);
                machine.handle.install(config, Arc::clone(&models[function])).await?;
                router.add_server(place, function as u32);
            }
            machine.handle.set_quotas(Arc::new(control.quotas()));
            machine.handle.set_slices(Arc::new(control.slices(place)));
            machines.push(machine);
        }
        let request = |(place, function): (usize, &SimulatedFunction)| {
            let needs = RouteRequest { weights: function.model.weights, memory: function.model.memory };
            (machine::revision(place, function), digest(place), needs)
        };
        let shared = Rc::new(RunContext {
            clock,
            machines,
            router: RefCell::new(router),
            records: RefCell::new(Vec::with_capacity(scenario.arrivals.len())),
            held: RefCell::default(),
            answered: Notify::new(),
            timeout: scenario.timeout,
            requests: scenario.functions.iter().enumerate().map(request).collect(),
            rows: scenario.functions.iter().map(|it| it.serving.batching.is_some()).collect(),
        });
        shared.pass(WARM_UP).await;
        if scenario.warmed {
            shared.warm().await;
        }
        let before = shared.snapshots().await;
        let began = shared.clock.now();
        let tasks = [
            actix_rt::spawn(faults(Rc::clone(&shared), scenario.faults.clone(), began)),
            actix_rt::spawn(telemetry(Rc::clone(&shared))),
            actix_rt::spawn(sample_holders(Rc::clone(&shared), top(scenario), looks_apart(scenario))),
        ];
        inject_requests(&shared, scenario, began).await;
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        Ok(shared.outcome(began, before).await)
    }
}

impl RunContext {
    async fn until(&self, at: Timestamp) {
        let wake = self.clock.wake_at(at, Sleeper::OUTSIDE);
        tokio::time::sleep(self.clock.sleep_for(wake.since(self.clock.now()))).await;
    }

    async fn pass(&self, span: Duration) {
        self.until(self.clock.now() + span).await;
    }

    /// Requests each function once, one after the other, and drops the records.
    async fn warm(self: &Rc<Self>) {
        for function in 0..self.requests.len() as u32 {
            send_request(Rc::clone(self), 0, function).await;
        }
        self.records.borrow_mut().clear();
    }

    fn record_request(&self, record: SimulatedRequest) {
        self.records.borrow_mut().push(record);
        self.answered.notify_one();
    }

    async fn snapshots(&self) -> Vec<NodeSnapshot> {
        let mut nodes = Vec::new();
        for machine in &self.machines {
            nodes.push(machine.handle.snapshot().await);
        }
        nodes
    }

    async fn outcome(&self, began: Timestamp, before: Vec<NodeSnapshot>) -> SimulationOutcome {
        let ended = self.clock.now();
        let nodes = self.snapshots().await;
        let mut records = self.records.take();
        records.sort_by_key(|record| record.request);
        let traces = self.machines.iter().filter_map(|machine| machine.trace.as_ref());
        let traces: Vec<_> =
            traces.map(|trace| trace.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect();
        for machine in &self.machines {
            machine.handle.stop().await;
        }
        let (sum, looks) = *self.held.borrow();
        SimulationOutcome {
            records,
            before,
            nodes,
            span: ended.since(began),
            held_of_top: if looks == 0 { 0.0 } else { sum as f64 / looks as f64 },
            traces,
        }
    }
}

/// Returns the model of the most popular function; the first of equally popular functions.
fn top(scenario: &ClusterScenario) -> Option<Digest> {
    let mut counts = BTreeMap::<u32, u64>::new();
    scenario.arrivals.iter().for_each(|arrival| *counts.entry(arrival.function).or_default() += 1);
    let top = counts.into_iter().max_by_key(|&(function, count)| (count, std::cmp::Reverse(function)));
    top.map(|(function, _)| digest(function as usize))
}

async fn faults(shared: Rc<RunContext>, faults: Vec<crate::scenario::ExecutorFault>, began: Timestamp) {
    for fault in faults {
        shared.until(began + fault.at.since(Timestamp::ZERO)).await;
        shared.machines[fault.node].executors.kill(fault.gpu);
    }
}

/// Reports the state of each node to the router at intervals. A cluster of one node needs no reports, because
/// the router has no choice.
async fn telemetry(shared: Rc<RunContext>) {
    while shared.machines.len() > 1 {
        shared.pass(TELEMETRY_EVERY).await;
        for (place, machine) in shared.machines.iter().enumerate() {
            let said = machine.handle.partial_snapshot(SnapshotScope::Machine).await;
            shared.router.borrow_mut().record_snapshot(place, &said);
        }
    }
}

fn looks_apart(scenario: &ClusterScenario) -> Duration {
    let span = scenario.arrivals.last().map_or(Duration::ZERO, |last| last.at.since(Timestamp::ZERO));
    LOOK_EVERY.max(span / LOOKS_MAX)
}

/// Samples the number of GPUs that hold the most popular model (L17).
async fn sample_holders(shared: Rc<RunContext>, top: Option<Digest>, apart: Duration) {
    let Some(top) = top else { return };
    loop {
        shared.pass(apart).await;
        let mut holders = 0;
        for machine in &shared.machines {
            let said = machine.handle.partial_snapshot(SnapshotScope::Machine).await;
            holders += holding(&said, top);
        }
        let mut held = shared.held.borrow_mut();
        *held = (held.0 + holders, held.1 + 1);
    }
}

fn holding(node: &NodeSnapshot, model: Digest) -> u64 {
    node.gpus.iter().filter(|gpu| gpu.models.iter().any(|it| it.digest == model)).count() as u64
}

async fn inject_requests(shared: &Rc<RunContext>, scenario: &ClusterScenario, began: Timestamp) {
    for (request, arrival) in scenario.arrivals.iter().enumerate() {
        let at = began + arrival.at.since(Timestamp::ZERO);
        if at > shared.clock.now() {
            shared.until(at).await;
        }
        actix_rt::spawn(send_request(Rc::clone(shared), request, arrival.function));
    }
    while shared.records.borrow().len() < scenario.arrivals.len() {
        shared.answered.notified().await;
    }
}

async fn send_request(shared: Rc<RunContext>, request: usize, function: u32) {
    let arrived = shared.clock.now();
    let (revision, digest, needs) = &shared.requests[function as usize];
    let node = shared.router.borrow_mut().choose(function, *digest, needs);
    let Some(node) = node else {
        let ending = RequestEnding::Failed { reason: Reason::FunctionNotReady };
        return shared.record_request(SimulatedRequest {
            request,
            function,
            arrived,
            finished: arrived,
            ending,
        });
    };
    let invocation = Attempt {
        cold: Duration::ZERO,
        behind: Duration::ZERO,
        counted: false,
        trial: None,
        request_id: RequestId::new(&format!("r{request}")).unwrap_or_else(|| unreachable!("r and a number")),
        attempts_left: 3,
        revision: revision.clone(),
        timeout: shared.timeout,
        objective: None,
        priority: 0,
        inputs: if shared.rows[function as usize] { vec![modelled::row()] } else { Vec::new() },
        descriptors: Vec::new(),
        on_gpus: OnGpus::default(),
        next: Vec::new(),
        outputs: Vec::new(),
    };
    let answer = shared.machines[node].handle.invoke(invocation).await;
    let finished = shared.clock.now();
    let ending = match answer {
        Ok(answer) => {
            shared.router.borrow_mut().record_run(node, function, answer.split.run);
            // The simulator has no programs, so every answer has a GPU.
            let gpu = answer.gpu.unwrap_or(GpuIndex(0));
            RequestEnding::Answered { node, gpu, attempts: answer.attempts, split: answer.split }
        }
        Err(failure) => RequestEnding::Failed { reason: failure.reason },
    };
    shared.record_request(SimulatedRequest { request, function, arrived, finished, ending });
}
