//! The core against a model of the leader: whatever gets lost, repeated or cut off on the way, the
//! model ends up with what the node has.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{DataId, Digest, FunctionName, NodeName, TenantName, Tier};
use proptest::prelude::*;

use super::load::{Load, Profile};
use super::*;

const EPOCH: Epoch = Epoch(4);

fn data(counter: u64) -> DataId {
    DataId { home: NodeName::new("n1").unwrap(), epoch: Epoch(2), counter }
}

fn function() -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new("f").unwrap() }
}

fn stored(counter: u64) -> Event {
    Event::DataStored { id: data(counter), bytes: Bytes(100) }
}

fn scored(m: u64, n: u64) -> Event {
    Event::Scored { function: function(), counts: SloCounts { m, n } }
}

/// What a leader keeps of one node.
#[derive(Debug, Default)]
struct Leader {
    epoch: Epoch,
    seq: u64,
    whole: bool,
    syncing: bool,
    models: BTreeMap<ModelCopy, Bytes>,
    entries: BTreeMap<DataId, Bytes>,
    entries_most: usize,
    counters: Counters,
    /// What earlier epochs counted.
    past: Counters,
}

type Counters = (BTreeMap<FunctionKey, SloCounts>, BTreeMap<FunctionKey, Usage>);

impl Leader {
    fn register(&mut self, epoch: Epoch) {
        for (function, counts) in std::mem::take(&mut self.counters.0) {
            let past = self.past.0.entry(function).or_default();
            *past = past.plus(counts);
        }
        for (function, usage) in std::mem::take(&mut self.counters.1) {
            let past = self.past.1.entry(function).or_default();
            *past = past.plus(usage);
        }
        let past = std::mem::take(&mut self.past);
        *self = Self { epoch, past, ..Self::default() };
    }

    fn take(&mut self, batch: &SyncBatch) -> Event {
        let SyncBatch { epoch, seq, part, delta } = batch;
        let (epoch, seq) = (*epoch, *seq);
        if epoch != self.epoch {
            return Event::Fenced { epoch };
        }
        if seq <= self.seq {
            return Event::Acknowledged { epoch, seq: self.seq };
        }
        let next = seq == self.seq + 1;
        let begins = matches!(part, SyncPart::Full(Portion::Only | Portion::First));
        let follows = begins
            || match part {
                SyncPart::Delta => next && self.whole && !self.syncing,
                SyncPart::Full(_) => next && self.syncing,
            };
        if !follows {
            return Event::ResyncWanted { epoch, seq, last: self.seq };
        }
        if begins {
            self.models.clear();
            self.entries.clear();
            self.syncing = true;
        }
        self.seq = seq;
        self.merge(delta);
        if let SyncPart::Full(Portion::Only | Portion::Last) = part {
            (self.whole, self.syncing) = (true, false);
        }
        Event::Acknowledged { epoch, seq }
    }

    fn merge(&mut self, delta: &NodeDelta) {
        for copy in &delta.models_gone {
            self.models.remove(copy);
        }
        self.models.extend(delta.models.iter().copied());
        for id in &delta.entries_gone {
            self.entries.remove(id);
        }
        self.entries.extend(delta.entries.iter().cloned());
        self.entries_most = self.entries_most.max(self.entries.len());
        for (function, counts) in &delta.slo {
            let known = self.counters.0.entry(function.clone()).or_default();
            *known = known.merge(*counts);
        }
        for (function, usage) in &delta.usage {
            let known = self.counters.1.entry(function.clone()).or_default();
            *known = known.merge(*usage);
        }
    }
}

/// A node whose time stands still unless moved.
struct Node {
    core: Checkpoint,
    now: Timestamp,
}

impl Node {
    fn new(config: Config) -> Self {
        Self { core: Checkpoint::new(config), now: Timestamp::ZERO }
    }

    fn registered() -> Self {
        let mut node = Self::new(Config::default());
        let first = node.say(Event::Registered { epoch: EPOCH });
        assert_eq!(sent(&first)[..], [(1, SyncPart::Full(Portion::Only))]);
        assert_eq!(node.acknowledge(1), []);
        node
    }

    fn say(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.core.on_event(self.now, event, &mut actions);
        actions
    }

    fn acknowledge(&mut self, seq: u64) -> Vec<Action> {
        self.say(Event::Acknowledged { epoch: EPOCH, seq })
    }

    fn wait(&mut self, ms: u64) -> Vec<Action> {
        self.now = self.now + Duration::from_millis(ms);
        self.say(Event::Tick)
    }
}

fn sent(actions: &[Action]) -> Vec<(u64, SyncPart)> {
    let batch = |action: &Action| match action {
        Action::Send(batch) => (batch.seq, batch.part),
        Action::Register => panic!("nothing to register for"),
    };
    actions.iter().map(batch).collect()
}

fn delta(actions: &[Action]) -> NodeDelta {
    match actions {
        [Action::Send(batch)] => batch.delta.clone(),
        other => panic!("not one batch: {other:?}"),
    }
}

#[test]
fn changes_are_gathered_and_told_once_a_period() {
    let mut node = Node::registered();
    let copy = ModelCopy { digest: Digest::of(b"m"), tier: Tier::Host };
    assert_eq!(node.say(Event::ModelLoaded { copy, bytes: Bytes(7) }), []);
    assert_eq!(node.say(scored(1, 1)), []);
    assert_eq!(node.say(scored(0, 1)), []);
    let expected = NodeDelta {
        models: vec![(copy, Bytes(7))],
        slo: vec![(function(), SloCounts { m: 1, n: 2 })],
        ..NodeDelta::default()
    };
    assert_eq!(delta(&node.wait(1000)), expected);
    assert_eq!(node.acknowledge(2), []);
    assert_eq!(node.wait(1000), [], "nothing changed");
    assert!(node.core.is_settled());
}

#[test]
fn data_that_dies_young_is_never_named() {
    let mut node = Node::registered();
    node.say(stored(1));
    node.wait(500);
    node.say(stored(2));
    assert_eq!(node.wait(499), []);
    assert_eq!(delta(&node.wait(1)).entries, [(data(1), Bytes(100))]);
    node.acknowledge(2);
    node.say(Event::DataDropped { id: data(1) });
    node.say(Event::DataDropped { id: data(2) });
    let gone = NodeDelta { entries_gone: vec![data(1)], ..NodeDelta::default() };
    assert_eq!(delta(&node.wait(1000)), gone);
}

#[test]
fn an_unanswered_batch_is_sent_again_unchanged() {
    let mut node = Node::registered();
    node.say(scored(1, 1));
    let first = node.wait(1000);
    node.say(scored(1, 1));
    assert_eq!(node.wait(999), []);
    assert_eq!(node.wait(1), first);
    assert_eq!(node.say(Event::Reached), first, "at once at another leader");
    assert_eq!(node.acknowledge(1), [], "an old answer is none");
    assert_eq!(delta(&node.acknowledge(2)).slo, [(function(), SloCounts { m: 2, n: 2 })]);
}

#[test]
fn a_gap_makes_everything_be_told_under_higher_numbers() {
    let mut node = Node::registered();
    node.say(stored(1));
    node.say(scored(3, 4));
    let first = node.wait(1000);
    assert_eq!(sent(&first), [(2, SyncPart::Delta)]);
    let wanted = |seq| Event::ResyncWanted { epoch: EPOCH, seq, last: 7 };
    assert_eq!(node.say(wanted(1)), [], "about another batch");
    let again = node.say(wanted(2));
    assert_eq!(sent(&again), [(8, SyncPart::Full(Portion::Only))]);
    assert_eq!(delta(&again), node.core.everything());
}

#[test]
fn a_new_epoch_begins_at_what_the_old_one_was_not_told() {
    let mut node = Node::registered();
    node.say(scored(3, 4));
    assert_eq!(sent(&node.wait(1000)), [(2, SyncPart::Delta)]);
    node.say(scored(1, 2));
    assert_eq!(node.say(Event::Fenced { epoch: Epoch(3) }), [], "another registration");
    assert_eq!(node.say(Event::Fenced { epoch: EPOCH }), [Action::Register]);
    assert_eq!(node.core.next_wake(), None);
    let full = node.say(Event::Registered { epoch: Epoch(9) });
    assert_eq!(sent(&full), [(1, SyncPart::Full(Portion::Only))]);
    assert_eq!(delta(&full).slo, [(function(), SloCounts { m: 1, n: 2 })]);
    assert_eq!((node.core.counts(&function()), node.core.seen()), (SloCounts { m: 1, n: 2 }, Epoch(9)));
}

#[test]
fn an_epoch_that_ends_in_a_full_sync_has_still_been_told_what_came_before() {
    let mut node = Node::new(Config { items_max: 1, ..Config::default() });
    node.say(Event::Registered { epoch: EPOCH });
    node.acknowledge(1);
    for number in 0..2 {
        let usage = Usage { gpu_ns: 5, requests: 1, idle_ms: 3 };
        node.say(Event::Used { function: Load::function_of(number), usage });
    }
    node.wait(1000);
    assert_eq!(sent(&node.acknowledge(2)), [(3, SyncPart::Delta)]);
    let resync = node.say(Event::ResyncWanted { epoch: EPOCH, seq: 3, last: 2 });
    assert_eq!(sent(&resync), [(4, SyncPart::Full(Portion::First))]);
    node.say(Event::Fenced { epoch: EPOCH });
    let full = node.say(Event::Registered { epoch: Epoch(9) });
    assert_eq!(delta(&full).usage, [], "both were told, one of them before the full sync");
}

#[test]
fn a_full_sync_comes_in_portions_and_changes_follow_it() {
    let mut node = Node::new(Config { items_max: 2, ..Config::default() });
    for counter in 0..5 {
        node.say(stored(counter));
    }
    node.wait(1000);
    let mut parts = Vec::new();
    let mut actions = node.say(Event::Registered { epoch: EPOCH });
    node.say(Event::DataDropped { id: data(0) });
    node.say(Event::DataDropped { id: data(4) });
    while let [(seq, part)] = sent(&actions)[..] {
        parts.push(part);
        actions = node.acknowledge(seq);
    }
    let full = SyncPart::Full;
    assert_eq!(parts, [full(Portion::First), full(Portion::Last), SyncPart::Delta]);
}

#[test]
fn what_is_beyond_the_bound_is_counted_and_named_when_there_is_room() {
    let mut node = Node::new(Config { entries_max: 2, ..Config::default() });
    for counter in 0..5 {
        node.say(stored(counter));
    }
    node.now = node.now + Duration::from_secs(1);
    let full = delta(&node.say(Event::Registered { epoch: EPOCH }));
    assert_eq!((full.entries.len(), full.overflow, node.core.overflow()), (2, Some(3), 3));
    node.acknowledge(1);
    node.say(Event::DataDropped { id: data(0) });
    let next = delta(&node.wait(1000));
    assert_eq!((next.entries_gone, next.entries), (vec![data(0)], vec![(data(2), Bytes(100))]));
    assert_eq!(next.overflow, Some(2));
}

#[derive(Debug, Clone)]
enum Step {
    /// Things happen on the node.
    Live(u8),
    /// Time passes.
    Wait(u16),
    /// The way there loses the next batch.
    LoseBatch,
    /// The way back loses the next answer.
    LoseAnswer,
    /// An answer from before comes again.
    RepeatAnswer,
    NewLeader,
    /// The leader declared the node lost.
    NodeLost,
    /// The controllers were rebuilt from nothing, and the node kept its epoch by chance.
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

/// A node and its leader, with what may go wrong between them.
struct Pair {
    node: Node,
    leader: Leader,
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
            leader: Leader::default(),
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
                match action {
                    Action::Send(_) if std::mem::take(&mut self.lose_batch) => {}
                    Action::Send(batch) => events.extend(self.deliver(&batch)),
                    Action::Register => self.register(),
                }
            }
        }
    }

    fn deliver(&mut self, batch: &SyncBatch) -> Option<Event> {
        self.batches += 1;
        let answer = self.leader.take(batch);
        self.last_answer = Some(answer.clone());
        (!std::mem::take(&mut self.lose_answer)).then_some(answer)
    }

    fn step(&mut self, load: &mut Load, step: &Step) {
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
                self.leader = Leader { epoch, ..Leader::default() };
            }
        }
    }

    fn settle(&mut self) {
        (self.lose_batch, self.lose_answer) = (false, false);
        // Whatever the leader forgot is noticed with the next change.
        self.tell(Event::Scored { function: Load::function_of(0), counts: SloCounts { m: 1, n: 1 } });
        for _ in 0..10 {
            self.node.now = self.node.now + Duration::from_secs(2);
            self.tell(Event::Tick);
        }
        assert!(self.node.core.is_settled());
    }
}

fn profile(live_max: u64) -> Profile {
    Profile { node: NodeName::new("n1").unwrap(), functions: 4, gpus: 2, live_max }
}

proptest! {
    #[test]
    fn the_leader_ends_up_with_what_the_node_has(
        steps in prop::collection::vec(step(), 0..60), seed: u64, items_max in 1usize..20, entries_max in 1usize..30,
    ) {
        let mut load = Load::new(profile(40), seed);
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

    /// Over all epochs, what was counted is never more than what happened, and no less while
    /// nothing is lost on the way.
    #[test]
    fn nothing_is_charged_twice(
        steps in prop::collection::vec(step(), 0..60), seed: u64, items_max in 1usize..5,
    ) {
        let mut load = Load::new(profile(0), seed);
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
    let mut load = Load::new(profile(100_000), 7);
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
