//! Runs the scenario over a bare heap of events. The same cores are wired by hand ([`wiring`]), in
//! the order in which actors read their messages, without actix, tokio or a clock.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::num::NonZeroU32;

use millrace_core::Core as _;
use millrace_core::attempts::Idempotence;
use millrace_core::ids::{BatchId, FunctionIndex, RequestKey, TransferId};
use millrace_core::trace::{CoreId, CoreTrace};
use millrace_gpu::lifecycle::{self, Lifecycle};
use millrace_memory::{BlockSize, MemoryMap};
use millrace_scheduling::admission::{self, Admission};
use millrace_scheduling::dispatch::{self, Dispatcher, LatencyObjective};
use millrace_slices::tokens;
use millrace_transfers::fabric::{self, LinkScheduler, link};
use millrace_types::policy::GpuSharingName;
use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Incarnation, ModelId, Timestamp};
use millrace_worker::clock::{Sleeper, own_microsecond};
use millrace_worker::node::{IN_FLIGHT_MAX, REQUESTS_MAX};
use millrace_worker::port::model::ModelledExecutor;

use self::wiring::Mail;
use crate::scenario::{Ending, GPUS, Scenario, ScenarioEvent};
use crate::two_times::Outcome;
use crate::world::OBJECTIVE;

mod wiring;

pub(crate) fn run(scenario: &Scenario) -> Outcome {
    let mut node = Node::new(scenario);
    node.boot(scenario);
    node.run(scenario);
    node.check_idle();
    Outcome { folds: node.trace.folds().clone(), endings: node.endings }
}

/// The parts that wake at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Outside,
    Core(CoreId),
    Port(GpuIndex),
}

struct GpuSlot {
    gpu: millrace_gpu::GpuCore,
    life: Lifecycle,
    port: ModelledExecutor,
    /// The link that issued each outstanding batch.
    out: BTreeMap<(TransferId, BatchId), LinkId>,
    up: bool,
    /// The last executor that the GPU core knows, and the last that was started.
    told: Incarnation,
    started: Incarnation,
}

struct Request {
    function: usize,
    attempt: u32,
    accepted: Timestamp,
}

struct Node<'a> {
    scenario: &'a Scenario,
    now: Timestamp,
    next_happening: usize,
    admissions: Vec<Admission>,
    dispatch: Dispatcher,
    fabric: LinkScheduler,
    places: Vec<GpuSlot>,
    links: BTreeMap<LinkId, link::LinkLedger>,
    mail: VecDeque<Mail>,
    heap: BinaryHeap<Reverse<(Timestamp, Source)>>,
    requests: BTreeMap<RequestKey, Request>,
    /// The GPU and the model of each transfer in progress.
    moving: BTreeMap<TransferId, (GpuIndex, ModelId)>,
    endings: BTreeMap<usize, Ending>,
    trace: CoreTrace,
}

impl<'a> Node<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let topology = &scenario.topology;
        let admission = |function: &crate::scenario::FunctionModel| {
            Admission::new(admission::Config {
                in_flight_max: IN_FLIGHT_MAX,
                deadline: Some(OBJECTIVE),
                idempotent: if function.idempotent { Idempotence::Yes } else { Idempotence::No },
            })
        };
        let seats = NonZeroU32::new(8).unwrap();
        let (sharing, open) = match scenario.gpu_sharing {
            GpuSharingName::Off => (None, NonZeroU32::MIN),
            GpuSharingName::Slices => (Some(tokens::Config::SLICES), seats),
        };
        let place = |gpu: &millrace_types::topology::TopologyGpu| GpuSlot {
            gpu: millrace_gpu::GpuCore::new(gpu.index, MemoryMap::new(gpu.memory, BlockSize::DEFAULT))
                .with_eviction(scenario.eviction)
                .with_sharing(sharing),
            life: Lifecycle::new(
                gpu.index,
                Incarnation(u64::from(gpu.index.0) + 1),
                GPUS.into(),
                scenario.seed,
            ),
            port: ModelledExecutor::new(gpu.index, scenario.behaviour()),
            out: BTreeMap::new(),
            up: false,
            told: Incarnation(0),
            started: Incarnation(0),
        };
        let gpus = topology.gpus.iter();
        let dispatch = dispatch::Config::of(topology, REQUESTS_MAX)
            .with_peers(topology)
            .with_ways(topology)
            .with_eviction(scenario.eviction)
            .with_seats(seats)
            .with_slice_seats(15)
            .with_open_seats(open)
            .with_policy(scenario.dispatch, scenario.seed);
        Self {
            scenario,
            now: Timestamp::ZERO,
            next_happening: 0,
            admissions: scenario.functions.iter().map(admission).collect(),
            dispatch: Dispatcher::new(&dispatch),
            fabric: LinkScheduler::with_sharing(topology, scenario.sharing),
            places: gpus.clone().map(place).collect(),
            links: (0..topology.links.len() as u32)
                .map(|link| (LinkId(link), link::LinkLedger::default()))
                .collect(),
            mail: VecDeque::new(),
            heap: BinaryHeap::new(),
            requests: BTreeMap::new(),
            moving: BTreeMap::new(),
            endings: BTreeMap::new(),
            trace: CoreTrace::default(),
        }
    }

    fn boot(&mut self, scenario: &Scenario) {
        for gpu in (0..GPUS).map(GpuIndex) {
            self.mail.push_back(Mail::Life(gpu, lifecycle::Event::Start));
        }
        for (model, function) in (0..).map(ModelId).zip(&scenario.functions) {
            let memory = function.weights;
            let weights = function.weights;
            self.mail.push_back(Mail::Dispatch(dispatch::Event::Install { model, memory, weights }));
            for gpu in (0..GPUS).map(GpuIndex) {
                self.mail.push_back(Mail::Gpu(gpu, millrace_gpu::Event::Install { model, memory, weights }));
            }
            if self.dispatch.uses_scores() {
                let objective =
                    crate::world::function(model.0 as usize).slo.as_ref().map(LatencyObjective::of);
                let function = FunctionIndex(model.0);
                self.mail.push_back(Mail::Dispatch(dispatch::Event::Objective { function, objective }));
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
            Source::Core(CoreId::Gpu(gpu)) => self.handle(Mail::Gpu(gpu, millrace_gpu::Event::Tick)),
            Source::Core(CoreId::Executor(gpu)) => self.handle(Mail::Life(gpu, lifecycle::Event::Tick)),
            Source::Core(CoreId::Fabric | CoreId::Link(_)) => unreachable!("no timer of its own"),
        }
    }

    fn happen(&mut self) {
        let (_, happening) = self.scenario.happenings[self.next_happening];
        self.next_happening += 1;
        match happening {
            ScenarioEvent::Arrive { request, function, timeout } => {
                let key = key_of(request);
                self.requests.insert(key, Request { function, attempt: 0, accepted: self.now });
                let accepted = self.now;
                let counted = false;
                let event = admission::Event::Arrive { key, accepted, timeout, attempts_left: 3, counted };
                self.mail.push_back(Mail::Admission(FunctionIndex(function as u32), event));
            }
            ScenarioEvent::Leave { request } => {
                if let Entry::Vacant(ending) = self.endings.entry(request) {
                    ending.insert(Ending::Cancelled);
                    let key = key_of(request);
                    let function = self.function_of(key);
                    self.mail.push_back(Mail::Admission(function, admission::Event::Cancel { key }));
                }
            }
            ScenarioEvent::Kill(gpu) => self.places[gpu.0 as usize].port.kill(self.now),
        }
    }

    fn deliver(&mut self) {
        while let Some(mail) = self.mail.pop_front() {
            let actor = self.actor_of(&mail);
            self.handle(mail);
            // An actor is done only when its mailbox is empty.
            while let Some(place) = self.mail.iter().position(|mail| self.actor_of(mail) == actor) {
                if let Some(mail) = self.mail.remove(place) {
                    self.handle(mail);
                }
            }
        }
    }

    /// Asserts that nothing is held after the end: no slot, no queue entry, no link, no transfer.
    fn check_idle(&self) {
        assert_eq!(self.admissions.iter().map(Admission::in_flight).sum::<usize>(), 0);
        assert_eq!((self.dispatch.in_flight(), self.dispatch.queued()), (0, 0));
        assert_eq!(self.fabric.in_flight(), 0);
        for GpuSlot { gpu, .. } in &self.places {
            assert_eq!(
                (gpu.requests(), gpu.transfers(), gpu.health()),
                (0, 0, millrace_gpu::ExecutorHealth::Up)
            );
            let held: u32 = gpu.memory().regions().map(|(_, region)| region.blocks()).sum();
            assert_eq!(gpu.memory().used_blocks(), held);
        }
        assert!(self.links.values().all(|link| link.outstanding() == 0));
    }
}

fn key_of(request: usize) -> RequestKey {
    RequestKey(request as u64 + 1)
}

fn request_of(key: RequestKey) -> usize {
    key.0 as usize - 1
}
