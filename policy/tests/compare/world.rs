//! A bare heap of events around one dispatcher: GPUs with memory, links that are shared, loads that
//! overlap the run before them. No clock, no randomness but the seed's.
//!
//! What is modelled: a GPU holds models, evicts as the scenario says, brings one at a time, and runs
//! one request at a time; a load from the host has its link alone or shares it evenly with the
//! neighbours'; a run ends after its own time and not before what is left to compute once the last
//! weights are there. What is not: messages take no time, nothing fails.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use millrace_policy::attempts::{Attempts, Idempotent};
use millrace_policy::core::Core;
use millrace_policy::dispatch::{
    Action, Config, Dispatch, Event, GpuConfig, Objective, PeerLink, PolicyConfig, Return, Stats,
};
use millrace_policy::ids::{FunctionIndex, RequestKey};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Incarnation, ModelId, Priority, SloCounts, Timestamp};

/// What a model is, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model {
    pub(crate) memory: Bytes,
    pub(crate) weights: Bytes,
    /// A copy from the host over a free link.
    pub(crate) load: u64,
    /// A run.
    pub(crate) run: u64,
    /// A run that begins with its load.
    pub(crate) with_load: u64,
    /// A copy from a peer and the run, where models come from peers.
    pub(crate) with_copy: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(crate) model: u32,
    pub(crate) objective: Option<(Duration, u32)>,
}

#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) gpus: Vec<GpuConfig>,
    pub(crate) switches: Vec<Vec<GpuIndex>>,
    pub(crate) peers: Vec<PeerLink>,
    pub(crate) models: Vec<Model>,
    pub(crate) functions: Vec<Function>,
    /// Whether replicas are evicted first, then light models, then heavy ones (T24); else the least
    /// recently used.
    pub(crate) light_first: bool,
    /// When requests come and whose they are, in order.
    pub(crate) arrivals: Vec<(u64, u32)>,
}

#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) mean_ms: f64,
    pub(crate) p99_ms: f64,
    /// Functions with a request that was answered.
    pub(crate) served: usize,
    /// Loads and copies by requests.
    pub(crate) miss_ratio: f64,
    /// Requests served in time, of those with an objective.
    pub(crate) in_time: f64,
    /// Functions that meet their objective, of those with one.
    pub(crate) compliant: f64,
    pub(crate) stats: Stats,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Arrives(usize),
    Loaded { gpu: usize, stamp: u64 },
    Ends { gpu: usize, stamp: u64 },
    Wake,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    key: u64,
    model: u32,
    turn: Option<u64>,
}

#[derive(Debug)]
struct Load {
    model: u32,
    from_peer: bool,
    /// What is left of it, as of `since`, on a link of its own.
    left: f64,
    since: u64,
    share: f64,
}

#[derive(Debug, Default)]
struct Gpu {
    slots: VecDeque<Slot>,
    /// When each model was last used here.
    used: BTreeMap<u32, u64>,
    /// When the models that are all here arrived, and whether from a peer.
    arrived: BTreeMap<u32, (u64, bool)>,
    load: Option<Load>,
    pinned: BTreeSet<u32>,
    memory: u64,
    taken: u64,
    stamp: u64,
}

pub(crate) struct World<'a> {
    scenario: &'a Scenario,
    dispatch: Dispatch,
    copies: bool,
    now: u64,
    gpus: Vec<Gpu>,
    due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    sequence: u64,
    /// How many GPUs each model is on.
    holders: BTreeMap<u32, u32>,
    /// When it is woken.
    wakes: BTreeSet<u64>,
    events: VecDeque<Event>,
    swaps: u64,
    came: Vec<(u64, u32)>,
    refused: usize,
    served: BTreeSet<u32>,
    latencies: Vec<u64>,
    scores: Vec<SloCounts>,
}

/// Runs a scenario to its last answer. Models come from peers for the policies that ask for it.
pub(crate) fn run(scenario: &Scenario, policy: PolicyConfig) -> Outcome {
    let copies = policy.scores();
    let config = Config {
        switches: scenario.switches.clone(),
        peers: scenario.peers.clone(),
        ..Config::new(scenario.gpus.clone(), 1_000_000).with_policy(policy, 1)
    };
    let gpu = |config: &GpuConfig| Gpu { memory: config.memory.0, ..Gpu::default() };
    let mut world = World {
        scenario,
        dispatch: Dispatch::new(&config),
        copies,
        now: 1,
        gpus: scenario.gpus.iter().map(gpu).collect(),
        due: BinaryHeap::new(),
        sequence: 0,
        holders: BTreeMap::new(),
        wakes: BTreeSet::new(),
        events: VecDeque::new(),
        swaps: 0,
        came: scenario.arrivals.clone(),
        refused: 0,
        served: BTreeSet::new(),
        latencies: Vec::new(),
        scores: vec![SloCounts::default(); scenario.functions.len()],
    };
    world.boot();
    world.run();
    world.outcome()
}

impl World<'_> {
    fn boot(&mut self) {
        for (index, model) in (0..).zip(&self.scenario.models) {
            let (memory, weights) = (model.memory, model.weights);
            self.events.push_back(Event::Install { model: ModelId(index), memory, weights });
            let (load, run) = (Duration::from_nanos(model.load), Duration::from_nanos(model.run));
            self.events.push_back(Event::Profile { model: ModelId(index), kind: 0, load, run });
        }
        for (index, function) in (0..).zip(&self.scenario.functions) {
            let objective = function
                .objective
                .and_then(|(deadline, share)| Some(Objective::from_billionths(share)?.within(deadline)));
            self.events.push_back(Event::Objective { function: FunctionIndex(index), objective });
        }
        for gpu in (0..self.gpus.len() as u32).map(GpuIndex) {
            self.events.push_back(Event::Up { gpu, incarnation: Incarnation(1) });
        }
        if !self.came.is_empty() {
            self.schedule(self.came[0].0, Due::Arrives(0));
        }
        self.deliver();
    }

    fn schedule(&mut self, at: u64, due: Due) {
        self.sequence += 1;
        self.due.push(Reverse((at.max(self.now), self.sequence, due)));
    }

    fn run(&mut self) {
        // A policy may want to be woken for ever.
        while self.latencies.len() + self.refused < self.came.len()
            && let Some(Reverse((at, _, due))) = self.due.pop()
        {
            self.now = at;
            match due {
                Due::Arrives(number) => self.arrives(number),
                Due::Loaded { gpu, stamp } if self.gpus[gpu].stamp == stamp => self.loaded(gpu),
                Due::Ends { gpu, stamp } if self.gpus[gpu].stamp == stamp => self.ends(gpu),
                Due::Loaded { .. } | Due::Ends { .. } => {}
                Due::Wake => {
                    self.wakes.remove(&at);
                    self.events.push_back(Event::Tick);
                }
            }
            self.deliver();
        }
    }

    fn arrives(&mut self, number: usize) {
        let (_, function) = self.came[number];
        let model = ModelId(self.scenario.functions[function as usize].model);
        let attempts = Attempts::new(3, Idempotent::Yes);
        let (key, function) = (RequestKey(number as u64), FunctionIndex(function));
        self.events.push_back(Event::Enqueue {
            key,
            function,
            model,
            attempts,
            priority: Priority::default(),
        });
        if let Some(&(at, _)) = self.came.get(number + 1) {
            self.schedule(at, Due::Arrives(number + 1));
        }
    }

    fn deliver(&mut self) {
        let mut actions = Vec::new();
        while let Some(event) = self.events.pop_front() {
            self.dispatch.on_event(Timestamp(self.now), event, &mut actions);
            for action in actions.drain(..) {
                self.act(action);
            }
        }
        if let Some(Timestamp(at)) = self.dispatch.next_wake()
            && self.wakes.insert(at.max(self.now))
        {
            self.schedule(at, Due::Wake);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Assign { gpu, key, model, .. } => {
                let it = &mut self.gpus[gpu.0 as usize];
                it.slots.push_back(Slot { key: key.0, model: model.0, turn: None });
                assert!(it.slots.len() <= millrace_policy::gpu::SLOTS_MAX, "{gpu} is overfull");
                self.advance(gpu.0 as usize);
            }
            Action::Recall { gpu, key } => {
                let it = &mut self.gpus[gpu.0 as usize];
                let place = it.slots.iter().position(|slot| slot.key == key.0 && slot.turn.is_none());
                let Some(place) = place else { return };
                let model = it.slots.remove(place).map(|slot| slot.model);
                let here = |model: &u32| {
                    it.arrived.contains_key(model)
                        || it.load.as_ref().is_some_and(|load| load.model == *model)
                        || it.slots.iter().any(|slot| slot.model == *model)
                };
                let models: Vec<_> = model.filter(|model| !here(model)).map(ModelId).into_iter().collect();
                self.events.push_back(Event::Evicted { gpu, models });
                self.events.push_back(Event::Returned { gpu, key, why: Return::Recalled });
            }
            Action::Pin { gpu, model } => drop(self.gpus[gpu.0 as usize].pinned.insert(model.0)),
            Action::Keep { .. } => unreachable!("nothing is kept"),
            Action::Unpin { gpu, model } => drop(self.gpus[gpu.0 as usize].pinned.remove(&model.0)),
            Action::Fail { key, .. } => {
                self.refused += 1;
                let (_, function) = self.came[key.0 as usize];
                let score = &mut self.scores[function as usize];
                *score = score.plus(SloCounts { m: 0, n: 1 });
            }
            // Nobody gives up, no GPU is lost, and the harness has its own eviction.
            Action::Cancel { .. } | Action::Prefetch { .. } | Action::Standing { .. } => {
                panic!("nobody asked for {action:?}");
            }
        }
    }

    /// Begins the next turn, brings what is missing, and says when the turn ends if that is known.
    fn advance(&mut self, gpu: usize) {
        self.bring(gpu);
        let (now, it) = (self.now, &mut self.gpus[gpu]);
        let Some(slot) = it.slots.front_mut() else { return };
        let turn = *slot.turn.get_or_insert(now);
        let (slot, model) = (*slot, self.scenario.models[slot.model as usize]);
        it.used.insert(slot.model, now);
        let Some(&(arrived, from_peer)) = it.arrived.get(&slot.model) else { return };
        let noise = 950 + mix(slot.key) % 101;
        let scaled = |time: u64| time * noise / 1000;
        let whole = if from_peer { model.with_copy.unwrap_or(model.with_load) } else { model.with_load };
        let load = if from_peer { self.copy_time(slot.model) } else { model.load };
        let after = scaled(whole.saturating_sub(load).min(model.run));
        let end = (turn + scaled(model.run)).max(arrived + after);
        self.restamp(gpu);
        let stamp = self.gpus[gpu].stamp;
        self.schedule(end, Due::Ends { gpu, stamp });
    }

    /// What is scheduled for a GPU counts no more, but for its load.
    fn restamp(&mut self, gpu: usize) {
        self.gpus[gpu].stamp += 1;
        self.schedule_load(gpu);
    }

    fn schedule_load(&mut self, gpu: usize) {
        let it = &self.gpus[gpu];
        let Some(load) = &it.load else { return };
        let at = load.since + (load.left / load.share).ceil() as u64;
        let stamp = it.stamp;
        self.schedule(at, Due::Loaded { gpu, stamp });
    }

    fn copy_time(&self, model: u32) -> u64 {
        let model = self.scenario.models[model as usize];
        model.with_copy.unwrap_or(model.with_load).saturating_sub(model.run)
    }

    fn bring(&mut self, gpu: usize) {
        let it = &self.gpus[gpu];
        if it.load.is_some() {
            return;
        }
        let lacks = |slot: &Slot| !it.arrived.contains_key(&slot.model);
        let Some(place) = it.slots.iter().position(lacks) else { return };
        let model = it.slots[place].model;
        let size = self.scenario.models[model as usize].memory.0;
        if !self.make_room(gpu, place, size) {
            return;
        }
        let from_peer = self.copies && self.peer_holds(gpu, model);
        self.swaps += 1;
        let left = match from_peer {
            true => self.copy_time(model),
            false => self.scenario.models[model as usize].load,
        };
        let (now, it) = (self.now, &mut self.gpus[gpu]);
        it.taken += size;
        it.load = Some(Load { model, from_peer, left: left as f64, since: now, share: 1.0 });
        self.share_links(gpu);
        self.schedule_load(gpu);
    }

    /// Evicts what no request before this one needs, those that are pinned last.
    fn make_room(&mut self, gpu: usize, place: usize, size: u64) -> bool {
        let it = &mut self.gpus[gpu];
        let mut gone = Vec::new();
        while it.taken + size > it.memory {
            let wanted = |model: &u32| it.slots.iter().take(place).any(|slot| slot.model == *model);
            let spare = it.arrived.keys().filter(|model| !wanted(model));
            let spares = |model: u32| {
                let of = self.scenario.models[model as usize];
                let replica = self.holders.get(&model).is_some_and(|&holders| holders > 1);
                let heavy = of.load * 2 * 100 >= of.run * 110;
                if self.scenario.light_first { (!replica, heavy) } else { (false, false) }
            };
            let key =
                |model: &&u32| (it.pinned.contains(model), spares(**model), it.used.get(model).copied());
            let Some(&victim) = spare.min_by_key(key) else { break };
            it.arrived.remove(&victim);
            *self.holders.entry(victim).or_default() -= 1;
            it.used.remove(&victim);
            it.taken -= self.scenario.models[victim as usize].memory.0;
            gone.push(ModelId(victim));
        }
        let fits = it.taken + size <= it.memory;
        if !gone.is_empty() {
            self.events.push_back(Event::Evicted { gpu: GpuIndex(gpu as u32), models: gone });
        }
        fits
    }

    fn peer_holds(&self, gpu: usize, model: u32) -> bool {
        let host = self.scenario.gpus[gpu].host_rate;
        self.scenario.peers.iter().any(|link| {
            let other = match (link.a.0 as usize, link.b.0 as usize) {
                (a, b) if a == gpu => b,
                (a, b) if b == gpu => a,
                _ => return false,
            };
            link.rate > host && self.gpus[other].arrived.contains_key(&model)
        })
    }

    /// A load began or ended on a GPU: those under its switch have more or less of the link.
    fn share_links(&mut self, gpu: usize) {
        let switches = self.scenario.switches.iter();
        let switch = switches.clone().find(|switch| switch.contains(&GpuIndex(gpu as u32)));
        let Some(switch) = switch else { return };
        let loads = |gpus: &[Gpu], index: &GpuIndex| {
            gpus[index.0 as usize].load.as_ref().is_some_and(|load| !load.from_peer)
        };
        let count = switch.iter().filter(|index| loads(&self.gpus, index)).count();
        for index in switch {
            if loads(&self.gpus, index) {
                let now = self.now;
                if let Some(load) = &mut self.gpus[index.0 as usize].load {
                    load.left -= (now - load.since) as f64 * load.share;
                    (load.since, load.share) = (now, 1.0 / count as f64);
                }
                self.restamp(index.0 as usize);
                self.advance(index.0 as usize);
            }
        }
    }

    fn loaded(&mut self, gpu: usize) {
        let it = &mut self.gpus[gpu];
        let Some(load) = it.load.take() else { return };
        it.arrived.insert(load.model, (self.now, load.from_peer));
        *self.holders.entry(load.model).or_default() += 1;
        it.used.insert(load.model, self.now);
        let (index, model) = (GpuIndex(gpu as u32), ModelId(load.model));
        self.events.push_back(Event::Loaded { gpu: index, model });
        self.share_links(gpu);
        self.advance(gpu);
    }

    fn ends(&mut self, gpu: usize) {
        let Some(slot) = self.gpus[gpu].slots.pop_front() else { return };
        self.gpus[gpu].used.insert(slot.model, self.now);
        let run = self.scenario.models[slot.model as usize].run * (950 + mix(slot.key) % 101) / 1000;
        let index = GpuIndex(gpu as u32);
        let (key, ran) = (RequestKey(slot.key), Some(Duration::from_nanos(run)));
        self.events.push_back(Event::Ended { gpu: index, key, ran });
        let (at, function) = self.came[slot.key as usize];
        let latency = self.now - at;
        self.latencies.push(latency);
        self.served.insert(function);
        if let Some((deadline, _)) = self.scenario.functions[function as usize].objective {
            let in_time = u64::from(u128::from(latency) <= deadline.as_nanos());
            let score = &mut self.scores[function as usize];
            *score = score.plus(SloCounts { m: in_time, n: 1 });
            let counts = *score;
            self.events.push_back(Event::Score { function: FunctionIndex(function), counts });
        }
        self.restamp(gpu);
        self.advance(gpu);
    }

    fn outcome(mut self) -> Outcome {
        self.latencies.sort_unstable();
        let answered = self.latencies.len();
        assert_eq!(answered + self.refused, self.came.len(), "a request is lost");
        assert_eq!((self.dispatch.queued(), self.dispatch.in_flight()), (0, 0), "a request is stuck");
        let ms = |nanos: u64| nanos as f64 / 1e6;
        let sum: u64 = self.latencies.iter().sum();
        let held = self.scenario.functions.iter().zip(&self.scores);
        let held: Vec<_> = held
            .filter(|(_, score)| score.n > 0)
            .filter_map(|(function, score)| Some((function.objective?.1, *score)))
            .collect();
        let all = held.iter().fold(SloCounts::default(), |all, (_, score)| all.plus(*score));
        let complies =
            |(share, score): &&(u32, SloCounts)| score.m * 1_000_000_000 >= u64::from(*share) * score.n;
        Outcome {
            mean_ms: ms(sum) / answered.max(1) as f64,
            p99_ms: ms(self.latencies.get(answered * 99 / 100).copied().unwrap_or(0)),
            miss_ratio: self.swaps as f64 / answered.max(1) as f64,
            in_time: all.m as f64 / all.n.max(1) as f64,
            compliant: held.iter().filter(complies).count() as f64 / held.len().max(1) as f64,
            served: self.served.len(),
            stats: self.dispatch.stats(),
        }
    }
}

/// SplitMix64's finisher: a number from a number.
pub(crate) fn mix(of: u64) -> u64 {
    let z = of.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A link's rate, for scenarios.
pub(crate) const fn gb(rate: u64) -> BytesPerSec {
    BytesPerSec::gb(rate)
}
