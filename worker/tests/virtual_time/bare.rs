//! The same scenario over a bare heap of events: the same cores, wired by hand with one queue of
//! messages, first in first out. No actix, no tokio, no clock.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use millrace_policy::admission::{self, Admission};
use millrace_policy::attempts::{Idempotent, Progress};
use millrace_policy::core::Core as _;
use millrace_policy::dispatch::{self, Dispatch};
use millrace_policy::fabric::{self, BatchFailure, Fabric, Grant, link};
use millrace_policy::gpu::{self, RunFailure};
use millrace_policy::ids::{BatchId, FunctionIndex, RequestKey, RunId, TransferId};
use millrace_policy::lifecycle::{self, Lifecycle};
use millrace_policy::trace::{CoreId, Trace};
use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Incarnation, ModelId, Timestamp};
use millrace_worker::clock::{Sleeper, own_microsecond};
use millrace_worker::node::{IN_FLIGHT_MAX, REQUESTS_MAX};
use millrace_worker::port::model::{CopyOrder, CopyRefusal, Model, Order, Word};

use crate::scenario::{Ending, GPUS, Happening, Scenario};
use crate::two_times::Outcome;
use crate::world::OBJECTIVE;

pub(crate) fn run(scenario: &Scenario) -> Outcome {
    let mut node = Node::new(scenario);
    node.boot(scenario);
    node.run(scenario);
    node.check_idle();
    Outcome { folds: node.trace.folds().clone(), endings: node.endings }
}

/// A message on its way.
enum Mail {
    Admission(FunctionIndex, admission::Event),
    Completed(RequestKey, gpu::Spent, GpuIndex),
    Dispatch(dispatch::Event),
    Fabric(fabric::Event),
    Down(GpuIndex, Vec<(RequestKey, Progress)>),
    Gpu(GpuIndex, gpu::Event),
    Life(GpuIndex, lifecycle::Event),
    Link(LinkId, link::Event),
    Order(GpuIndex, Incarnation, Order),
    Grant(Grant),
    Revoke(GpuIndex, TransferId, BatchId),
    Word(GpuIndex, Incarnation, Word),
}

/// Who may have something to do at some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Outside,
    Core(CoreId),
    Port(GpuIndex),
}

struct Place {
    gpu: gpu::Gpu,
    life: Lifecycle,
    port: Model,
    up: bool,
    /// Of the last executor the GPU was told of, and of the last that was started.
    told: Incarnation,
    started: Incarnation,
}

struct Request {
    function: usize,
    attempt: u32,
}

struct Node<'a> {
    scenario: &'a Scenario,
    now: Timestamp,
    next_happening: usize,
    admissions: Vec<Admission>,
    dispatch: Dispatch,
    fabric: Fabric,
    places: Vec<Place>,
    links: BTreeMap<LinkId, link::Link>,
    mail: VecDeque<Mail>,
    heap: BinaryHeap<Reverse<(Timestamp, Source)>>,
    requests: BTreeMap<RequestKey, Request>,
    endings: BTreeMap<usize, Ending>,
    trace: Trace,
}

impl<'a> Node<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let topology = &scenario.topology;
        let admission = |function: &crate::scenario::FunctionModel| {
            Admission::new(admission::Config {
                in_flight_max: IN_FLIGHT_MAX,
                deadline: Some(OBJECTIVE),
                idempotent: if function.idempotent { Idempotent::Yes } else { Idempotent::No },
            })
        };
        let rate = |gpu: &millrace_types::topology::Gpu| topology.links[gpu.host_path[0].0 as usize].rate;
        let place = |gpu: &millrace_types::topology::Gpu| Place {
            gpu: gpu::Gpu::new(gpu.index, gpu.memory),
            life: Lifecycle::new(
                gpu.index,
                Incarnation(u64::from(gpu.index.0) + 1),
                GPUS.into(),
                scenario.seed,
            ),
            port: Model::new(gpu.index, scenario.behaviour()),
            up: false,
            told: Incarnation(0),
            started: Incarnation(0),
        };
        let gpus = topology.gpus.iter();
        let dispatch = dispatch::Config {
            gpus: gpus
                .clone()
                .map(|gpu| dispatch::GpuConfig { memory: gpu.memory, host_rate: rate(gpu) })
                .collect(),
            queue_max: REQUESTS_MAX,
        };
        Self {
            scenario,
            now: Timestamp::ZERO,
            next_happening: 0,
            admissions: scenario.functions.iter().map(admission).collect(),
            dispatch: Dispatch::new(&dispatch),
            fabric: Fabric::new(topology),
            places: gpus.clone().map(place).collect(),
            links: gpus.flat_map(|gpu| &gpu.host_path).map(|&link| (link, link::Link::default())).collect(),
            mail: VecDeque::new(),
            heap: BinaryHeap::new(),
            requests: BTreeMap::new(),
            endings: BTreeMap::new(),
            trace: Trace::default(),
        }
    }

    fn boot(&mut self, scenario: &Scenario) {
        for gpu in (0..GPUS).map(GpuIndex) {
            self.mail.push_back(Mail::Life(gpu, lifecycle::Event::Start));
        }
        for (model, function) in (0..).map(ModelId).zip(&scenario.functions) {
            let (memory, weights) = (function.weights, function.weights);
            self.mail.push_back(Mail::Dispatch(dispatch::Event::Install { model, memory, weights }));
            for gpu in (0..GPUS).map(GpuIndex) {
                self.mail.push_back(Mail::Gpu(gpu, gpu::Event::Install { model, memory, weights }));
            }
        }
        self.deliver();
    }

    fn run(&mut self, scenario: &Scenario) {
        self.schedule();
        let mut last: Option<(Timestamp, Source)> = None;
        while let Some(Reverse((at, source))) = self.heap.pop() {
            if at > scenario.end {
                break;
            }
            if self.wake_of(source) != Some(at) {
                continue;
            }
            let own = last.is_none_or(|(before, other)| before < at || other == source);
            assert!(own, "seed {}: {last:?} and {source:?} at {at:?}", scenario.seed);
            last = Some((at, source));
            self.now = at;
            self.wake(source);
            self.deliver();
            self.schedule();
        }
    }

    fn sources(&self) -> Vec<Source> {
        let mut sources = vec![Source::Outside, Source::Core(CoreId::Dispatch)];
        for gpu in (0..GPUS).map(GpuIndex) {
            sources.extend([
                Source::Port(gpu),
                Source::Core(CoreId::Gpu(gpu)),
                Source::Core(CoreId::Executor(gpu)),
            ]);
        }
        let functions = (0..self.admissions.len() as u32).map(FunctionIndex);
        sources.extend(functions.map(|function| Source::Core(CoreId::Admission(function))));
        sources
    }

    fn schedule(&mut self) {
        for source in self.sources() {
            if let Some(at) = self.wake_of(source) {
                self.heap.push(Reverse((at, source)));
            }
        }
    }

    fn wake_of(&self, source: Source) -> Option<Timestamp> {
        let core = match source {
            Source::Outside => return self.scenario.happenings.get(self.next_happening).map(|&(at, _)| at),
            Source::Port(gpu) => return self.places[gpu.0 as usize].port.next_wake(),
            Source::Core(core) => core,
        };
        let at = match core {
            CoreId::Dispatch => {
                [self.dispatch.next_wake(), self.fabric.next_wake()].into_iter().flatten().min()
            }
            CoreId::Admission(function) => self.admissions[function.0 as usize].next_wake(),
            CoreId::Gpu(gpu) => self.places[gpu.0 as usize].gpu.next_wake(),
            CoreId::Executor(gpu) => self.places[gpu.0 as usize].life.next_wake(),
            CoreId::Fabric | CoreId::Link(_) => None,
        };
        Some(own_microsecond(at?.max(self.now), Sleeper::core(core)))
    }

    fn wake(&mut self, source: Source) {
        let now = self.now;
        match source {
            Source::Outside => self.happen(),
            Source::Port(gpu) => {
                let place = &mut self.places[gpu.0 as usize];
                if let Some(word) = place.port.wake(now) {
                    self.mail.push_back(Mail::Word(gpu, place.started, word));
                }
            }
            Source::Core(CoreId::Dispatch) => {
                if self.dispatch.next_wake().is_some_and(|at| at <= now) {
                    self.handle(Mail::Dispatch(dispatch::Event::Tick));
                }
                if self.fabric.next_wake().is_some_and(|at| at <= now) {
                    self.handle(Mail::Fabric(fabric::Event::Tick));
                }
            }
            Source::Core(CoreId::Admission(function)) => {
                self.handle(Mail::Admission(function, admission::Event::Tick));
            }
            Source::Core(CoreId::Gpu(gpu)) => self.handle(Mail::Gpu(gpu, gpu::Event::Tick)),
            Source::Core(CoreId::Executor(gpu)) => self.handle(Mail::Life(gpu, lifecycle::Event::Tick)),
            Source::Core(CoreId::Fabric | CoreId::Link(_)) => unreachable!("no timer of its own"),
        }
    }

    fn happen(&mut self) {
        let (_, happening) = self.scenario.happenings[self.next_happening];
        self.next_happening += 1;
        match happening {
            Happening::Arrive { request, function, timeout } => {
                let key = key_of(request);
                self.requests.insert(key, Request { function, attempt: 0 });
                let event = admission::Event::Arrive { key, accepted: self.now, timeout, attempts_left: 3 };
                self.mail.push_back(Mail::Admission(FunctionIndex(function as u32), event));
            }
            Happening::Leave { request } => {
                if let Entry::Vacant(ending) = self.endings.entry(request) {
                    ending.insert(Ending::Cancelled);
                    let key = key_of(request);
                    let function = self.function_of(key);
                    self.mail.push_back(Mail::Admission(function, admission::Event::Cancel { key }));
                }
            }
            Happening::Kill(gpu) => self.places[gpu.0 as usize].port.kill(self.now),
        }
    }

    fn deliver(&mut self) {
        while let Some(mail) = self.mail.pop_front() {
            self.handle(mail);
        }
    }

    fn handle(&mut self, mail: Mail) {
        let now = self.now;
        match mail {
            Mail::Admission(function, event) => self.admission(function, event, None),
            Mail::Completed(key, spent, gpu) => {
                let event = admission::Event::Completed { key, ran: spent.ran };
                self.admission(self.function_of(key), event, Some(gpu));
            }
            Mail::Dispatch(event) => self.dispatch(event),
            Mail::Fabric(event) => self.fabric(event),
            Mail::Down(gpu, lost) => {
                self.fabric(fabric::Event::Down { gpu });
                for &link in &self.scenario.topology.gpus[gpu.0 as usize].host_path {
                    self.mail.push_back(Mail::Link(link, link::Event::Down(gpu)));
                }
                self.dispatch(dispatch::Event::Down { gpu, lost });
            }
            Mail::Gpu(gpu, event) => self.gpu(gpu, event),
            Mail::Life(gpu, event) => self.life(gpu, event),
            Mail::Link(link, event) => self.link(link, event),
            Mail::Order(gpu, incarnation, order) => {
                let place = &mut self.places[gpu.0 as usize];
                if place.up && incarnation == place.life.incarnation() {
                    place.port.order(now, order);
                }
            }
            Mail::Grant(grant) => self.copy(&grant),
            Mail::Revoke(gpu, transfer, batch) => {
                let place = &mut self.places[gpu.0 as usize];
                if place.up {
                    place.port.order(now, Order::Revoke { transfer: transfer.0, batch: batch.0 });
                }
            }
            Mail::Word(gpu, incarnation, word) => self.word(gpu, incarnation, word),
        }
    }

    fn function_of(&self, key: RequestKey) -> FunctionIndex {
        FunctionIndex(self.requests[&key].function as u32)
    }

    fn admission(&mut self, function: FunctionIndex, event: admission::Event, gpu: Option<GpuIndex>) {
        let mut actions = Vec::new();
        let core = &mut self.admissions[function.0 as usize];
        self.trace.step(CoreId::Admission(function), core, self.now, event, &mut actions);
        for action in actions {
            match action {
                admission::Action::Enqueue { key, attempts } => {
                    let model = ModelId(function.0);
                    self.mail.push_back(Mail::Dispatch(dispatch::Event::Enqueue { key, model, attempts }));
                }
                admission::Action::Answer { key } => {
                    let (gpu, attempts) = (gpu.unwrap(), self.requests[&key].attempt);
                    self.endings.insert(request_of(key), Ending::Answered { gpu, attempts });
                }
                admission::Action::Fail { key, reason, may_have_executed } => {
                    self.endings.insert(request_of(key), Ending::Failed { reason, may_have_executed });
                }
                admission::Action::Withdraw { key } => {
                    self.mail.push_back(Mail::Dispatch(dispatch::Event::Withdraw { key }));
                }
                admission::Action::Retired => unreachable!("nothing is retired"),
            }
        }
    }

    fn dispatch(&mut self, event: dispatch::Event) {
        let mut actions = Vec::new();
        self.trace.step(CoreId::Dispatch, &mut self.dispatch, self.now, event, &mut actions);
        for action in actions {
            match action {
                dispatch::Action::Assign { gpu, key, model, incarnation, attempt } => {
                    self.requests.get_mut(&key).unwrap().attempt = attempt;
                    let function = self.function_of(key);
                    self.mail.push_back(Mail::Admission(function, admission::Event::Dispatched { key }));
                    self.mail.push_back(Mail::Gpu(gpu, gpu::Event::Assign { key, model, incarnation }));
                }
                dispatch::Action::Recall { gpu, key } => {
                    self.mail.push_back(Mail::Gpu(gpu, gpu::Event::Recall { key }));
                }
                dispatch::Action::Cancel { gpu, key } => {
                    self.mail.push_back(Mail::Gpu(gpu, gpu::Event::Cancel { key }));
                }
                dispatch::Action::Fail { key, reason, may_have_executed } => {
                    let event = admission::Event::Failed { key, reason, may_have_executed };
                    self.mail.push_back(Mail::Admission(self.function_of(key), event));
                }
            }
        }
    }

    fn fabric(&mut self, event: fabric::Event) {
        let mut actions = Vec::new();
        self.trace.step(CoreId::Fabric, &mut self.fabric, self.now, event, &mut actions);
        for action in actions {
            self.mail.push_back(match action {
                fabric::Action::Grant { link, grant } => Mail::Link(link, link::Event::Grant(grant)),
                fabric::Action::Revoke { link, gpu, transfer, batch } => {
                    Mail::Link(link, link::Event::Revoke { gpu, transfer, batch })
                }
                fabric::Action::Carried { link, size } => Mail::Link(link, link::Event::Carried(size)),
                fabric::Action::Arrived { gpu, model, generation, chunks } => {
                    Mail::Gpu(gpu, gpu::Event::Arrived { model, generation, chunks })
                }
                fabric::Action::Ended { gpu, transfer, outcome } => {
                    Mail::Gpu(gpu, gpu::Event::TransferEnded { transfer, outcome })
                }
            });
        }
    }

    fn gpu(&mut self, index: GpuIndex, event: gpu::Event) {
        let mut actions = Vec::new();
        let place = &mut self.places[index.0 as usize];
        if let gpu::Event::Up { incarnation } = event {
            place.told = incarnation;
        }
        self.trace.step(CoreId::Gpu(index), &mut place.gpu, self.now, event, &mut actions);
        let told = place.told;
        for action in actions {
            let mail = match action {
                gpu::Action::Replace => Mail::Life(index, lifecycle::Event::Kill),
                gpu::Action::Transfer { transfer, cargo, chunks } => {
                    Mail::Fabric(fabric::Event::Start { transfer, gpu: index, cargo, chunks })
                }
                gpu::Action::CancelTransfer { transfer } => Mail::Fabric(fabric::Event::Cancel { transfer }),
                gpu::Action::Completed { key, spent } => Mail::Completed(key, spent, index),
                gpu::Action::Failed { key, reason, may_have_executed } => {
                    let event = admission::Event::Failed { key, reason, may_have_executed };
                    Mail::Admission(self.function_of(key), event)
                }
                gpu::Action::Up { incarnation } => {
                    Mail::Dispatch(dispatch::Event::Up { gpu: index, incarnation })
                }
                gpu::Action::Down { lost } => Mail::Down(index, lost),
                gpu::Action::Ended { key, ran } => {
                    Mail::Dispatch(dispatch::Event::Ended { gpu: index, key, ran })
                }
                gpu::Action::Returned { key, why } => {
                    Mail::Dispatch(dispatch::Event::Returned { gpu: index, key, why })
                }
                gpu::Action::Evicted { models } => {
                    Mail::Dispatch(dispatch::Event::Evicted { gpu: index, models })
                }
                gpu::Action::Forgot { .. } => unreachable!("nothing is removed"),
                command => Mail::Order(index, told, self.order(command)),
            };
            self.mail.push_back(mail);
        }
    }

    /// What a GPU's command is to the modelled executor.
    fn order(&self, command: gpu::Action) -> Order {
        let program = |model: ModelId| u64::from(model.0);
        match command {
            gpu::Action::LoadProgram { model } => {
                let weights = self.scenario.functions[model.0 as usize].weights;
                Order::Load { program: program(model), weights }
            }
            gpu::Action::UnloadProgram { model } => Order::Unload { program: program(model) },
            gpu::Action::Map { model, generation, .. } => {
                Order::Map { program: program(model), generation: generation.0 }
            }
            gpu::Action::Unmap { model, generation } => {
                Order::Unmap { program: program(model), generation: generation.0 }
            }
            gpu::Action::Run { run, model, generation, .. } => {
                Order::Run { run: run.0, program: program(model), generation: generation.0 }
            }
            gpu::Action::CancelRun { run } => Order::Cancel { run: run.0 },
            other => unreachable!("{other:?} is not for the executor"),
        }
    }

    fn life(&mut self, index: GpuIndex, event: lifecycle::Event) {
        let mut actions = Vec::new();
        let place = &mut self.places[index.0 as usize];
        self.trace.step(CoreId::Executor(index), &mut place.life, self.now, event, &mut actions);
        for action in actions {
            match action {
                lifecycle::Action::Spawn { incarnation } => {
                    place.started = incarnation;
                    place.port.start(self.now);
                }
                lifecycle::Action::Kill => {
                    place.up = false;
                    place.port.kill(self.now);
                }
                lifecycle::Action::Up { incarnation } => {
                    place.up = true;
                    self.mail.push_back(Mail::Gpu(index, gpu::Event::Up { incarnation }));
                }
                lifecycle::Action::Down { .. } => {
                    place.up = false;
                    self.mail.push_back(Mail::Gpu(index, gpu::Event::Down));
                }
                lifecycle::Action::Stopped => unreachable!("nothing is stopped"),
            }
        }
    }

    fn link(&mut self, id: LinkId, event: link::Event) {
        let mut actions = Vec::new();
        let core = self.links.get_mut(&id).unwrap();
        self.trace.step(CoreId::Link(id), core, self.now, event, &mut actions);
        for action in actions {
            self.mail.push_back(match action {
                link::Action::Copy(grant) => Mail::Grant(grant),
                link::Action::Revoke { gpu, transfer, batch } => Mail::Revoke(gpu, transfer, batch),
                link::Action::Done { transfer, batch } => {
                    Mail::Fabric(fabric::Event::Done { transfer, batch })
                }
                link::Action::Failed { transfer, batch, why } => {
                    Mail::Fabric(fabric::Event::Failed { transfer, batch, why })
                }
            });
        }
    }

    fn copy(&mut self, grant: &Grant) {
        let place = &mut self.places[grant.gpu.0 as usize];
        if !place.up {
            return;
        }
        let order = CopyOrder {
            transfer: grant.transfer.0,
            batch: grant.batch.0,
            program: grant.cargo.model.0.into(),
            generation: grant.cargo.generation.0,
            size: grant.cargo.span(&grant.chunks).1,
            not_before: grant.not_before,
            not_after: grant.not_after,
        };
        place.port.order(self.now, Order::Copy(order));
    }

    fn word(&mut self, index: GpuIndex, incarnation: Incarnation, word: Word) {
        let place = &self.places[index.0 as usize];
        let first_link = self.scenario.topology.gpus[index.0 as usize].host_path[0];
        let mail = match word {
            Word::Ready => Mail::Life(index, lifecycle::Event::Ready { incarnation }),
            Word::Exited => Mail::Life(index, lifecycle::Event::Exited { incarnation }),
            _ if !place.up || incarnation != place.life.incarnation() => return,
            Word::Loaded { program } => {
                Mail::Gpu(index, gpu::Event::ProgramLoaded { model: ModelId(program as u32) })
            }
            Word::CopyDone { transfer, batch, started, finished, .. } => {
                let (transfer, batch) = (TransferId(transfer), BatchId(batch));
                Mail::Link(first_link, link::Event::Done { transfer, batch, started, finished })
            }
            Word::CopyFailed { transfer, batch, why } => {
                let why = match why {
                    CopyRefusal::NotBegun => BatchFailure::NotBegun,
                    CopyRefusal::NotMapped | CopyRefusal::Device => BatchFailure::Faulty,
                };
                let (transfer, batch) = (TransferId(transfer), BatchId(batch));
                Mail::Link(first_link, link::Event::Failed { transfer, batch, why })
            }
            Word::RunDone { run, started, finished, waited } => {
                Mail::Gpu(index, gpu::Event::RunDone { run: RunId(run), started, finished, waited })
            }
            Word::RunFailed { run } => failed(index, run, RunFailure::Model),
            Word::RunNotThere { run } => failed(index, run, RunFailure::NotThere),
            Word::RunCancelled { run } => Mail::Gpu(index, gpu::Event::RunCancelled { run: RunId(run) }),
        };
        // What the Executor actor does with its own core it does at once.
        match mail {
            Mail::Life(..) => self.handle(mail),
            other => self.mail.push_back(other),
        }
    }

    /// Once everything has ended, nothing is held: no slot, no queue, no link, no transfer.
    fn check_idle(&self) {
        assert_eq!(self.admissions.iter().map(Admission::in_flight).sum::<usize>(), 0);
        assert_eq!((self.dispatch.in_flight(), self.dispatch.queued()), (0, 0));
        assert_eq!(self.fabric.in_flight(), 0);
        for Place { gpu, .. } in &self.places {
            assert_eq!((gpu.requests(), gpu.transfers(), gpu.health()), (0, 0, gpu::Health::Up));
            let held: u32 = gpu.memory().regions().map(|(_, region)| region.blocks()).sum();
            assert_eq!(gpu.memory().used_blocks(), held);
        }
        assert!(self.links.values().all(|link| link.outstanding() == 0));
    }
}

fn failed(gpu: GpuIndex, run: u64, why: RunFailure) -> Mail {
    Mail::Gpu(gpu, gpu::Event::RunFailed { run: RunId(run), why })
}

fn key_of(request: usize) -> RequestKey {
    RequestKey(request as u64 + 1)
}

fn request_of(key: RequestKey) -> usize {
    key.0 as usize - 1
}
