//! The worker's side of the checkpoints (`nodes::checkpoint`) against the replicated state.
//! Whatever is lost, repeated or restarted between them, the state ends up with the workers' data.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::ops::Bound;
use std::time::Duration;

use millrace_cluster_state::{
    CallerName, CheckpointCoverage, CommandEffect, CommandOutcome, CommandRefusal, ControllerId,
    DataLocation, ModelSummary, Proposal, RulesVersion, State, StateCommand, UnixMillis,
};
use millrace_core::Core;
use millrace_nodes::checkpoint::{Action, Config, Event, WorkerCheckpoint};
use millrace_types::checkpoint::SYNC_BYTES_MAX;
use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionSpec, NodeName, SloCounts, SyncBatch, Timestamp, Usage,
};
use proptest::prelude::*;

use self::load::{LoadProfile, NodeLoad};

#[path = "../../policy/nodes/src/checkpoint/load.rs"]
mod load;

const FUNCTIONS: u64 = 4;

/// A controller group that never fails to commit.
struct Group {
    state: State,
    index: u64,
}

impl Group {
    /// Returns a group with the functions that the load names.
    fn new() -> Self {
        let mut group = Self { state: State::default(), index: 0 };
        group.propose(StateCommand::InitCluster { cluster_id: ClusterId("test".into()) }).unwrap();
        group.propose(StateCommand::SetClusterVersion { version: RulesVersion::NEWEST }).unwrap();
        let digest = Digest::of(b"model");
        let model =
            ModelSummary { weights: Bytes(1), parameters: 1, launches: 1, inputs: vec![], outputs: vec![] };
        group
            .propose(StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder: ControllerId(1) })
            .unwrap();
        for number in 0..FUNCTIONS {
            let spec = FunctionSpec::new(NodeLoad::function_of(number));
            group
                .propose(StateCommand::ApplyFunction { spec, digest, expected: None, voters: vec![] })
                .unwrap();
        }
        group
    }

    fn propose(&mut self, command: StateCommand) -> CommandOutcome {
        self.index += 1;
        let caller = CallerName("test".into());
        let proposal = Proposal { stamp: UnixMillis(self.index), caller, idempotency: None, command };
        self.state.apply(self.index, &proposal)
    }

    fn register(&mut self, node: &NodeName, seen: Epoch) -> Epoch {
        let register = StateCommand::RegisterNode {
            name: node.clone(),
            instance: "i".into(),
            address: "127.0.0.1:1".into(),
            gpus: vec![],
            topology: "test".into(),
            host_memory: Bytes::gib(8),
            seen,
        };
        match self.propose(register).unwrap() {
            CommandEffect::Registered { epoch } | CommandEffect::AlreadyRegistered { epoch } => epoch,
            other => panic!("{other:?}"),
        }
    }

    /// Commits a batch and returns the answer; `None` if the batch's registration has ended.
    fn take(&mut self, node: &NodeName, batch: &SyncBatch) -> Option<Event> {
        let SyncBatch { epoch, seq, .. } = *batch;
        Some(match self.propose(StateCommand::SyncNode { node: node.clone(), batch: batch.clone() }) {
            Ok(CommandEffect::Synced { seq }) => Event::Acknowledged { epoch, seq },
            Ok(CommandEffect::SyncRepeated { last }) => Event::Acknowledged { epoch, seq: last },
            Ok(CommandEffect::ResyncWanted { last }) => Event::ResyncWanted { epoch, seq, last },
            Err(CommandRefusal::Fenced { .. }) => return None,
            other => panic!("{other:?}"),
        })
    }
}

struct Worker {
    name: NodeName,
    core: WorkerCheckpoint,
    /// The highest epoch of the worker's registrations and of the names of its data.
    seen: Epoch,
    load: NodeLoad,
    lose_batch: bool,
    lose_answer: bool,
}

struct World {
    group: Group,
    workers: Vec<Worker>,
    now: Timestamp,
    largest: usize,
}

impl World {
    fn new(config: Config, seed: u64) -> Self {
        let workers = (0..3).map(|number| {
            let name = NodeName::new(&format!("n{number}")).unwrap();
            // Some workers share data: a worker is the home of the data, and others hold replicas.
            let home = NodeName::new(&format!("n{}", number / 2)).unwrap();
            let profile = LoadProfile { node: home, functions: FUNCTIONS, gpus: 2, live_max: 20 };
            let load = NodeLoad::new(profile, seed + number);
            let core = WorkerCheckpoint::new(config);
            Worker { name, core, seen: Epoch(1), load, lose_batch: false, lose_answer: false }
        });
        let mut world =
            Self { group: Group::new(), workers: workers.collect(), now: Timestamp::ZERO, largest: 0 };
        for worker in 0..world.workers.len() {
            world.register(worker);
        }
        world
    }

    fn register(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        let epoch = self.group.register(&worker.name, worker.seen);
        worker.seen = worker.seen.max(epoch);
        self.tell(at, Event::Registered { epoch });
    }

    fn tell(&mut self, at: usize, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            let worker = &mut self.workers[at];
            worker.core.on_event(self.now, event, &mut actions);
            for action in actions {
                let Action::Send(batch) = action;
                let worker = &mut self.workers[at];
                if std::mem::take(&mut worker.lose_batch) {
                    continue;
                }
                self.largest = self.largest.max(batch.delta.len());
                let answer = self.group.take(&worker.name, &batch);
                if std::mem::take(&mut worker.lose_answer) {
                    continue;
                }
                match answer {
                    Some(answer) => events.push(answer),
                    None => self.register(at),
                }
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Live(at, events) => {
                for _ in 0..events {
                    let event = self.workers[at].load.step();
                    self.tell(at, event);
                }
            }
            Step::Wait(ms) => self.wait(u64::from(ms)),
            Step::LoseBatch(at) => self.workers[at].lose_batch = true,
            Step::LoseAnswer(at) => self.workers[at].lose_answer = true,
            Step::NodeLost(at) => {
                let name = self.workers[at].name.clone();
                if let Some(epoch) = self.group.state.node(&name).map(|node| node.epoch) {
                    self.group.propose(StateCommand::NodeLost { name, epoch }).unwrap();
                }
            }
            Step::Restart => self.group.state = State::decode(&self.group.state.encode()).unwrap(),
            Step::Rebuild => self.group = Group::new(),
        }
    }

    fn wait(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
        for at in 0..self.workers.len() {
            self.tell(at, Event::Tick);
        }
    }

    fn settle(&mut self) {
        for at in 0..self.workers.len() {
            self.workers[at].lose_batch = false;
            self.workers[at].lose_answer = false;
            // The worker notices a loss with its next batch.
            let counts = SloCounts { m: 1, n: 1 };
            self.tell(at, Event::Scored { function: NodeLoad::function_of(0), counts });
        }
        for _ in 0..10 {
            self.wait(2000);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Live(usize, u8),
    Wait(u16),
    LoseBatch(usize),
    LoseAnswer(usize),
    NodeLost(usize),
    /// All controllers restart from a snapshot.
    Restart,
    /// The group is rebuilt from nothing.
    Rebuild,
}

fn step() -> impl Strategy<Value = Step> {
    let at = || 0..3usize;
    prop_oneof![
        10 => (at(), 1u8..30).prop_map(|(at, events)| Step::Live(at, events)),
        8 => (1u16..1500).prop_map(Step::Wait),
        2 => at().prop_map(Step::LoseBatch),
        2 => at().prop_map(Step::LoseAnswer),
        2 => at().prop_map(Step::NodeLost),
        1 => Just(Step::Restart),
        1 => Just(Step::Rebuild),
    ]
}

fn pairs<K: Clone, V: Clone>(map: impl IntoIterator<Item = (K, V)>) -> Vec<(K, V)> {
    map.into_iter().collect()
}

proptest! {
    #[test]
    fn the_state_converges_to_the_data_of_the_workers(
        steps in prop::collection::vec(step(), 0..50), seed in 0u64..1 << 40, items_max in 1usize..20,
        entries_max in 1usize..25,
    ) {
        let mut world = World::new(Config { items_max, entries_max, ..Config::default() }, seed);
        for step in &steps {
            world.step(step);
        }
        world.settle();
        let state = &world.group.state;
        prop_assert_eq!(state.check_invariants(), Ok(()));
        prop_assert!(world.largest <= items_max);
        for worker in &world.workers {
            prop_assert!(worker.core.is_settled());
            let truth = worker.core.everything();
            let checkpoint = state.checkpoint(&worker.name).unwrap();
            prop_assert_eq!(checkpoint.knowledge, CheckpointCoverage::Whole);
            prop_assert_eq!(pairs(checkpoint.models.clone()), truth.models);
            prop_assert_eq!(pairs(checkpoint.entries.clone()), truth.entries.clone());
            let counts = checkpoint.scores.iter().map(|(key, score)| (key.clone(), score.counts));
            prop_assert_eq!(pairs(counts), truth.slo);
            prop_assert_eq!(pairs(checkpoint.usage.clone()), truth.usage);
            prop_assert_eq!(Some(checkpoint.alphas.clone()), truth.alphas);
            prop_assert_eq!(Some(checkpoint.overflow), truth.overflow);
            prop_assert_eq!(checkpoint.dropped, 0);
            for (id, _) in &truth.entries {
                match state.locate(id) {
                    DataLocation::Held { home, holders, .. } => {
                        prop_assert!(holders.contains(&worker.name) && holders.contains(&home));
                    }
                    other => prop_assert!(false, "{} is {:?}", id, other),
                }
            }
        }
    }

    /// Usage is charged at most once, however often nodes are lost and return.
    #[test]
    fn usage_is_charged_at_most_once(steps in prop::collection::vec(step(), 0..50), seed in 0u64..1 << 40) {
        let mut world = World::new(Config { items_max: 3, ..Config::default() }, seed);
        let mut happened = Usage::default();
        for step in steps.iter().filter(|step| !matches!(step, Step::Rebuild)) {
            if let Step::Live(at, events) = *step {
                for _ in 0..events {
                    let event = world.workers[at].load.step();
                    if let Event::Used { usage, .. } = &event {
                        happened = happened.plus(*usage);
                    }
                    world.tell(at, event);
                }
            } else {
                world.step(step);
            }
        }
        world.settle();
        let charged = world.group.state.bills(Bound::Unbounded).fold(Usage::NONE, |sum, (_, usage)| sum.plus(usage));
        prop_assert_eq!(charged.merge(happened), happened);
        let loses = |step: &Step| matches!(step, Step::LoseBatch(_) | Step::LoseAnswer(_) | Step::NodeLost(_));
        if !steps.iter().any(loses) {
            prop_assert_eq!(charged, happened);
        }
    }
}

/// The worker fills a batch by the maximum size of its items, so no command exceeds the bound.
#[test]
fn a_batch_keeps_to_its_bytes_with_short_and_long_names() {
    for name in ["n", &"n".repeat(63)] {
        let node = NodeName::new(name).unwrap();
        let profile = LoadProfile { node: node.clone(), functions: 3_000, gpus: 4, live_max: 100_000 };
        let mut load = NodeLoad::new(profile, 11);
        let mut core = WorkerCheckpoint::new(Config::default());
        for _ in 0..60_000 {
            core.on_event(Timestamp::ZERO, load.step(), &mut Vec::new());
        }
        let mut actions = Vec::new();
        let now = Timestamp::ZERO + Duration::from_secs(1);
        core.on_event(now, Event::Registered { epoch: Epoch(u64::MAX) }, &mut actions);
        let mut sizes = Vec::new();
        while let Some(Action::Send(batch)) = actions.pop() {
            let command = StateCommand::SyncNode { node: node.clone(), batch: (*batch).clone() };
            sizes.push(rmp_serde::to_vec_named(&command).unwrap().len());
            let acknowledged = Event::Acknowledged { epoch: batch.epoch, seq: batch.seq };
            core.on_event(now, acknowledged, &mut actions);
        }
        let largest = sizes.iter().max().unwrap();
        assert!(*largest <= SYNC_BYTES_MAX && *largest > SYNC_BYTES_MAX / 4, "{largest} of {}", sizes.len());
        assert!(core.is_settled());
    }
}
