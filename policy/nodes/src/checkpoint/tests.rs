//! The core against a model of the leader.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{DataId, Digest, FunctionName, MemoryTier, NodeName, TenantName};

use super::load::NodeLoad;
use super::*;

mod properties;

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

/// A leader's copy of one node's state.
#[derive(Debug, Default)]
struct LeaderModel {
    epoch: Epoch,
    seq: u64,
    whole: bool,
    syncing: bool,
    models: BTreeMap<ModelCopy, Bytes>,
    entries: BTreeMap<DataId, Bytes>,
    entries_most: usize,
    counters: Counters,
    /// Counters of earlier epochs.
    past: Counters,
}

type Counters = (BTreeMap<FunctionKey, SloCounts>, BTreeMap<FunctionKey, Usage>);

impl LeaderModel {
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

    /// Accepts a batch and returns the answer, or `None` if the batch's registration is over.
    fn take(&mut self, batch: &SyncBatch) -> Option<Event> {
        let &SyncBatch { epoch, seq, part, ref delta } = batch;
        if epoch != self.epoch {
            return None;
        }
        if seq <= self.seq {
            return Some(Event::Acknowledged { epoch, seq: self.seq });
        }
        let next = seq == self.seq + 1;
        let begins = matches!(part, SyncPart::Full(SyncPortion::Only | SyncPortion::First));
        let follows = begins
            || match part {
                SyncPart::Delta => next && self.whole && !self.syncing,
                SyncPart::Full(_) => next && self.syncing,
            };
        if !follows {
            return Some(Event::ResyncWanted { epoch, seq, last: self.seq });
        }
        if begins {
            self.models.clear();
            self.entries.clear();
            self.syncing = true;
        }
        self.seq = seq;
        self.merge(delta);
        if let SyncPart::Full(SyncPortion::Only | SyncPortion::Last) = part {
            (self.whole, self.syncing) = (true, false);
        }
        Some(Event::Acknowledged { epoch, seq })
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

/// A node with a manual clock.
struct Node {
    core: WorkerCheckpoint,
    now: Timestamp,
}

impl Node {
    fn new(config: Config) -> Self {
        Self { core: WorkerCheckpoint::new(config), now: Timestamp::ZERO }
    }

    fn registered() -> Self {
        let mut node = Self::new(Config::default());
        let first = node.say(Event::Registered { epoch: EPOCH });
        assert_eq!(sent(&first)[..], [(1, SyncPart::Full(SyncPortion::Only))]);
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
    actions.iter().map(|Action::Send(batch)| (batch.seq, batch.part)).collect()
}

fn delta(actions: &[Action]) -> NodeDelta {
    match actions {
        [Action::Send(batch)] => batch.delta.clone(),
        other => panic!("not one batch: {other:?}"),
    }
}

#[test]
fn changes_are_gathered_and_sent_once_a_period() {
    let mut node = Node::registered();
    let copy = ModelCopy { digest: Digest::of(b"m"), tier: MemoryTier::Host };
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
    assert_eq!(node.acknowledge(1), [], "an old answer is ignored");
    assert_eq!(delta(&node.acknowledge(2)).slo, [(function(), SloCounts { m: 2, n: 2 })]);
}

#[test]
fn a_gap_triggers_a_full_sync_with_higher_numbers() {
    let mut node = Node::registered();
    node.say(stored(1));
    node.say(scored(3, 4));
    let first = node.wait(1000);
    assert_eq!(sent(&first), [(2, SyncPart::Delta)]);
    let wanted = |seq| Event::ResyncWanted { epoch: EPOCH, seq, last: 7 };
    assert_eq!(node.say(wanted(1)), [], "about another batch");
    let again = node.say(wanted(2));
    assert_eq!(sent(&again), [(8, SyncPart::Full(SyncPortion::Only))]);
    assert_eq!(delta(&again), node.core.everything());
}

#[test]
fn a_new_epoch_begins_with_counts_that_the_old_epoch_did_not_send() {
    let mut node = Node::registered();
    node.say(scored(3, 4));
    assert_eq!(sent(&node.wait(1000)), [(2, SyncPart::Delta)]);
    node.say(scored(1, 2));
    let full = node.say(Event::Registered { epoch: Epoch(9) });
    assert_eq!(sent(&full), [(1, SyncPart::Full(SyncPortion::Only))]);
    assert_eq!(delta(&full).slo, [(function(), SloCounts { m: 1, n: 2 })]);
    assert_eq!(node.core.counts(&function()), SloCounts { m: 1, n: 2 });
}

#[test]
fn usage_sent_before_an_interrupted_full_sync_is_not_sent_again() {
    let mut node = Node::new(Config { items_max: 1, ..Config::default() });
    node.say(Event::Registered { epoch: EPOCH });
    node.acknowledge(1);
    for number in 0..2 {
        let usage = Usage { gpu_ns: 5, requests: 1, idle_ms: 3 };
        node.say(Event::Used { function: NodeLoad::function_of(number), usage });
    }
    node.wait(1000);
    assert_eq!(sent(&node.acknowledge(2)), [(3, SyncPart::Delta)]);
    let resync = node.say(Event::ResyncWanted { epoch: EPOCH, seq: 3, last: 2 });
    assert_eq!(sent(&resync), [(4, SyncPart::Full(SyncPortion::First))]);
    let full = node.say(Event::Registered { epoch: Epoch(9) });
    assert_eq!(delta(&full).usage, [], "both were sent, one of them before the full sync");
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
    assert_eq!(parts, [full(SyncPortion::First), full(SyncPortion::Last), SyncPart::Delta]);
}

#[test]
fn data_beyond_the_bound_is_counted_and_named_when_there_is_room() {
    let mut node = Node::new(Config { entries_max: 2, ..Config::default() });
    for counter in 0..5 {
        node.say(stored(counter));
    }
    node.now = node.now + Duration::from_secs(1);
    let full = delta(&node.say(Event::Registered { epoch: EPOCH }));
    assert_eq!((full.entries.len(), full.overflow, node.core.data.overflow()), (2, Some(3), 3));
    node.acknowledge(1);
    node.say(Event::DataDropped { id: data(0) });
    let next = delta(&node.wait(1000));
    assert_eq!((next.entries_gone, next.entries), (vec![data(0)], vec![(data(2), Bytes(100))]));
    assert_eq!(next.overflow, Some(2));
}
