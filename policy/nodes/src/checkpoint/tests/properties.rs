//! The leader ends up with the node's state, although messages are lost, repeated or cut off.

use proptest::prelude::*;

use super::super::load::{LoadProfile, NodeLoad};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Events happen on the node.
    Live(u8),
    /// Time passes.
    Wait(u16),
    /// The next batch is lost.
    LoseBatch,
    /// The next answer is lost.
    LoseAnswer,
    /// An earlier answer arrives again.
    RepeatAnswer,
    NewLeader,
    /// The leader declares the node lost.
    NodeLost,
    /// The controllers are rebuilt from nothing, and the node keeps its epoch by chance.
    LeaderForgot,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1u8..30).prop_map(Step::Live),
        8 => (1u16..1500).prop_map(Step::Wait),
        2 => Just(Step::LoseBatch),
        2 => Just(Step::LoseAnswer),
        1 => Just(Step::RepeatAnswer),
        1 => Just(Step::NewLeader),
        1 => Just(Step::NodeLost),
        1 => Just(Step::LeaderForgot),
    ]
}

/// A node and its leader, with the faults between them.
struct Pair {
    node: Node,
    leader: LeaderModel,
    epochs: u64,
    lose_batch: bool,
    lose_answer: bool,
    last_answer: Option<Event>,
    batches: usize,
}

impl Pair {
    fn new(config: Config) -> Self {
        Self {
            node: Node::new(config),
            leader: LeaderModel::default(),
            epochs: 0,
            lose_batch: false,
            lose_answer: false,
            last_answer: None,
            batches: 0,
        }
    }

    fn register(&mut self) {
        self.epochs += 1;
        let epoch = Epoch(self.epochs);
        self.leader.register(epoch);
        self.tell(Event::Registered { epoch });
    }

    fn tell(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.node.say(event) {
                let Action::Send(batch) = action;
                if !std::mem::take(&mut self.lose_batch) {
                    events.extend(self.deliver(&batch));
                }
            }
        }
    }

    fn deliver(&mut self, batch: &SyncBatch) -> Option<Event> {
        self.batches += 1;
        let answer = self.leader.take(batch);
        self.last_answer = answer.clone().or(self.last_answer.take());
        if std::mem::take(&mut self.lose_answer) {
            return None;
        }
        if answer.is_none() {
            self.register();
        }
        answer
    }

    fn step(&mut self, load: &mut NodeLoad, step: &Step) {
        match step {
            Step::Live(events) => (0..*events).for_each(|_| self.tell(load.step())),
            Step::Wait(ms) => {
                self.node.now = self.node.now + Duration::from_millis(u64::from(*ms));
                self.tell(Event::Tick);
            }
            Step::LoseBatch => self.lose_batch = true,
            Step::LoseAnswer => self.lose_answer = true,
            Step::RepeatAnswer => self.last_answer.clone().into_iter().for_each(|it| self.tell(it)),
            Step::NewLeader => self.tell(Event::Reached),
            Step::NodeLost => {
                self.epochs += 1;
                self.leader.register(Epoch(self.epochs));
            }
            Step::LeaderForgot => {
                let epoch = self.leader.epoch;
                self.leader = LeaderModel { epoch, ..LeaderModel::default() };
            }
        }
    }

    fn settle(&mut self) {
        (self.lose_batch, self.lose_answer) = (false, false);
        // The next change reveals a leader that forgot its state.
        self.tell(Event::Scored { function: NodeLoad::function_of(0), counts: SloCounts { m: 1, n: 1 } });
        for _ in 0..10 {
            self.node.now = self.node.now + Duration::from_secs(2);
            self.tell(Event::Tick);
        }
        assert!(self.node.core.is_settled());
    }
}

fn profile(live_max: u64) -> LoadProfile {
    LoadProfile { node: NodeName::new("n1").unwrap(), functions: 4, gpus: 2, live_max }
}

proptest! {
    #[test]
    fn the_leader_ends_up_with_the_state_of_the_node(
        steps in prop::collection::vec(step(), 0..60), seed: u64, items_max in 1usize..20, entries_max in 1usize..30,
    ) {
        let mut load = NodeLoad::new(profile(40), seed);
        let mut pair = Pair::new(Config { items_max, entries_max, ..Config::default() });
        pair.register();
        for step in &steps {
            pair.step(&mut load, step);
        }
        pair.settle();
        let truth = pair.node.core.everything();
        prop_assert_eq!(pair.leader.models.into_iter().collect::<Vec<_>>(), truth.models);
        prop_assert_eq!(pair.leader.entries.into_iter().collect::<Vec<_>>(), truth.entries);
        prop_assert_eq!(pair.leader.counters.0.into_iter().collect::<Vec<_>>(), truth.slo);
        prop_assert_eq!(pair.leader.counters.1.into_iter().collect::<Vec<_>>(), truth.usage);
        prop_assert!(pair.leader.entries_most <= entries_max);
    }

    /// Over all epochs, the charged usage is never more than the real usage. Without losses on the
    /// way, the two are equal.
    #[test]
    fn nothing_is_charged_twice(
        steps in prop::collection::vec(step(), 0..60), seed: u64, items_max in 1usize..5,
    ) {
        let mut load = NodeLoad::new(profile(0), seed);
        let mut happened = Usage::default();
        let mut pair = Pair::new(Config { items_max, ..Config::default() });
        pair.register();
        for step in steps.iter().filter(|step| !matches!(step, Step::LeaderForgot)) {
            if let Step::Live(events) = step {
                for _ in 0..*events {
                    let event = load.step();
                    if let Event::Used { usage, .. } = &event {
                        happened = happened.plus(*usage);
                    }
                    pair.tell(event);
                }
            } else {
                pair.step(&mut load, step);
            }
        }
        pair.settle();
        pair.leader.register(Epoch(u64::MAX));
        let charged = pair.leader.past.1.values().fold(Usage::default(), |sum, usage| sum.plus(*usage));
        prop_assert_eq!(charged.merge(happened), happened);
        let loses = |step: &Step| matches!(step, Step::LoseBatch | Step::LoseAnswer | Step::NodeLost);
        if !steps.iter().any(loses) {
            prop_assert_eq!(charged, happened);
        }
    }
}

#[test]
fn a_hundred_thousand_entries_take_a_hundred_batches() {
    let mut load = NodeLoad::new(profile(100_000), 7);
    let mut pair = Pair::new(Config::default());
    for _ in 0..100_000 {
        let event = load.store();
        pair.tell(event);
    }
    pair.node.now = pair.node.now + Duration::from_secs(1);
    pair.register();
    assert_eq!(pair.leader.entries.len(), 100_000);
    assert_eq!(pair.batches, 100);
}
