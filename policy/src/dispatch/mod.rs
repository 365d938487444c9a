//! Which request goes to which GPU. One core of the Node actor.
//!
//! One code path for every policy: a bounded queue, who may wait in it at all, what becomes of a
//! request that lost its GPU, handing ahead and asking back. What is chosen in config
//! ([`PolicyConfig`]) is the order in which requests wait and which goes where:
//!
//! | name | first | to | ahead |
//! |---|---|---|---|
//! | `fifo` | the oldest | an idle holder, else the emptiest idle GPU | yes, see below |
//! | `lb` | the oldest | the GPU that has been idle longest (L18) | no |
//! | `lalb`, `lalb-o3` | a hit, at most so many times past older ones, else the oldest | an idle holder, the own queue of a busy one, or a miss (L09 to L14) | from a GPU's own queue |
//! | `torpor` | by required request count (T18 to T21) | an idle holder, else by interference (T22) | no |
//! | `random` | as `torpor` | an idle holder, else any idle GPU (T28) | no |
//! | `unified` | what can be in time and matters most | the least estimated finish: idle holder, peer, host, behind a busy holder | what has no deadline |
//! | `native`, `nonswap`, `infless-ka` | the oldest of those bound to a GPU | that one ([`bound`], T28) | no |
//! | `simpleswap` | the oldest | an idle holder, else any idle GPU (T28) | no |
//!
//! Each is a [`policy::Policy`]; requests of different [priorities](priority) have one of their own each.
//!
//! **Handing ahead** (`fifo`). Where no GPU is idle, the oldest request is handed ahead to a
//! busy GPU that has no next one yet: one that holds its model, else the one that is likely to be
//! free first; so a GPU never waits for a message. A GPU that falls idle with nothing in the queue
//! asks a next one back from a busy neighbour.
//!
//! More than one goes ahead only where that costs nobody anything: to a GPU that holds the model
//! and will begin it sooner than it could be asked back ([`RECALL_COST`]). Where runs take a few
//! microseconds, the wake of an executor is then shared by several of them.
//!
//! **When a GPU is lost** ([`recovery`]) the models that requests still wait for and that no other GPU
//! holds are brought to the others at once (T16).
//!
//! **Another policy** ([`change`]) may take over at any time, with all that waits.
//!
//! **Kept warm** ([`warm`]): a model may be wanted on so many GPUs without a request for it.
//!
//! **Likely next** ([`likely`], D29): what a workflow asks for next is brought to a GPU that has time for it.
//!
//! A suspect, a request that was around when a GPU was lost, is given a GPU of its own: it is not
//! handed ahead and nobody is handed ahead behind it.
//!
//! **Data** ([`inputs`]). A workflow's step that reads what lies in the memory of some of the GPUs goes
//! there, where its policy has no reason to prefer another: `fifo`, `lalb` and `torpor` among GPUs that
//! are equal to them; `unified` adds what bringing it takes to the estimated finish.
//!
//! **What things take** is one model's word for all policies ([`cost`]).
//!
//! **Cost** (L16). A decision of any policy costs the logarithm of what waits, the models on one
//! GPU and the GPUs that hold one model, whatever the number of requests (`benches/dispatch.rs`).
//!
//! ```text
//! Enqueue, Withdraw                      ┌───────┐  Assign, Recall, Cancel, Prefetch, …
//! ──────────────────────────────────────►│       ├──────────────────────────────────► Gpu
//! Up, Down, Ended, Returned, Evicted     │       │  Fail
//! ──────────────────────────────────────►│       ├──────────────────────────────────► Function
//! Objective, Score, Forget, Learned      │       │
//! ──────────────────────────────────────►└───────┘
//! ```

mod arrival;
mod assign;
mod bound;
mod change;
mod config;
mod cost;
mod departures;
mod fleet;
mod glance;
mod gpus;
mod holders;
mod inputs;
mod lalb;
mod learn;
mod likely;
mod models;
mod overtaking;
mod pins;
mod policy;
mod priority;
mod protocol;
mod queue;
mod recall;
mod recovery;
mod setting;
mod standings;
mod torpor;
mod unified;
mod warm;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, ModelId, Reason, Timestamp};

pub use self::config::{
    AGED_EVERY, AlphaRule, Binding, BoundConfig, COLD_START, Choice, Config, Counts, FREE_OVERTAKES_MAX,
    GpuConfig, KEEP_ALIVE, OVERTAKES_MAX, Order, POLICIES, PeerLink, PolicyConfig, RUNTIME_MEMORY,
    TorporConfig, UNIFIED_OVERTAKES_MAX, UnifiedConfig, WINDOW_MAX, gpu_types, kind_of,
};
pub use self::cost::{Predicted, PredictionError};
pub use self::inputs::{INPUT_GPUS_MAX, Inputs};
pub use self::likely::{LIKELY_FOR, LIKELY_MAX, Prewarms};
pub use self::policy::Stats;
pub use self::protocol::{Action, Event, Learned, Objective, Request, Return};
pub use self::warm::WARM_RETRY;

use self::cost::Errors;
use self::departures::Turn;
use self::fleet::Fleet;
use self::gpus::Held;
use self::likely::Hint;
use self::models::{Models, Slot};
use self::policy::{Decision, Entry, Policy, View};
use self::queue::{SizeRank, Waiting};
use self::warm::Warm;
use crate::attempts::Progress;
use crate::core::Core;
use crate::decision_text::DecisionText;
use crate::gpu::SLOTS_MAX;
use crate::ids::RequestKey;
use crate::memory::blocks_for;

/// What asking a request back costs: below that it is left where it is, and a run is not yet late.
pub const RECALL_COST: Duration = Duration::from_micros(200);
/// Requests a GPU has been handed ahead, at most.
pub const AHEAD_MAX: usize = SLOTS_MAX - 1;

#[derive(Debug, Clone, Copy)]
enum Place {
    Queued { request: Waiting, reserved: Option<GpuIndex> },
    On(GpuIndex),
}

/// The node's queue and what it knows of its GPUs.
#[derive(Debug)]
pub struct Dispatch {
    queue_max: u32,
    /// The GPUs' sizes in blocks, smallest first, each once.
    sizes: Vec<u32>,
    fleet: Fleet,
    models: Models,
    policy: Box<dyn Policy>,
    /// As it is now.
    config: Config,
    places: BTreeMap<RequestKey, Place>,
    queued: usize,
    /// How many requests wait for a GPU alone, by it and their model.
    pins: BTreeMap<(GpuIndex, Slot), u32>,
    warm: Warm,
    /// Models that are likely to be asked for, and that no GPU could bring yet.
    likely: Vec<Hint>,
    /// Requests that are not let into the queue yet.
    outside: usize,
    /// Of requests that stand for several, how many rows run as one.
    rows: BTreeMap<RequestKey, u32>,
    /// Of requests whose data is on GPUs, where.
    inputs: BTreeMap<RequestKey, Inputs>,
    /// When to look again whether an idle GPU should ask for a neighbour's next request.
    look_again: Option<Timestamp>,
    errors: Errors,
    stats: Stats,
}

impl Dispatch {
    /// An empty queue; no GPU is up yet.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let size = |gpu: &GpuConfig| u32::try_from(gpu.memory.0 / crate::memory::BLOCK.0).unwrap_or(u32::MAX);
        let mut sizes: Vec<u32> = config.gpus.iter().map(size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let rank = |gpu| SizeRank(sizes.partition_point(|&other| other < size(gpu)));
        let ranks: Vec<SizeRank> = config.gpus.iter().map(rank).collect();
        let (policy, idle_order) = policy::policy(config, sizes.len());
        Self {
            queue_max: config.queue_max,
            fleet: Fleet::new(config, &ranks, idle_order),
            models: Models::default(),
            policy,
            config: config.clone(),
            places: BTreeMap::new(),
            queued: 0,
            pins: BTreeMap::new(),
            warm: Warm::default(),
            likely: Vec::new(),
            outside: 0,
            rows: BTreeMap::new(),
            inputs: BTreeMap::new(),
            look_again: None,
            errors: Errors::default(),
            stats: Stats::default(),
            sizes,
        }
    }

    /// Requests that wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Whether a request waits or is on a GPU.
    #[must_use]
    pub fn holds(&self, key: RequestKey) -> bool {
        self.places.contains_key(&key)
    }

    /// Requests that wait or are on a GPU.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.places.len()
    }

    /// How many rows run as one for a request: 1, unless it stands for several.
    #[must_use]
    pub fn rows(&self, key: RequestKey) -> u32 {
        self.rows.get(&key).copied().unwrap_or(1)
    }

    /// What a run of a model with so many rows is expected to take, where it takes longest.
    #[must_use]
    pub fn predicted_run(&self, model: ModelId, rows: u32) -> Option<Duration> {
        self.models.longest_run(self.models.installed(model)?, rows)
    }

    /// Whether its decisions depend on [`Event::Objective`], [`Event::Score`] and [`Event::Forget`]:
    /// others need not be told. What arrives where, [`Event::Loaded`], is told to all: what a swap
    /// takes, and which links are busy, is the same model's word for every policy.
    #[must_use]
    pub fn wants_scores(&self) -> bool {
        self.policy.scores()
    }

    /// What it has counted so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let top_copies = self.models.top().map_or(0, |model| model.holders.len());
        let mut stats = Stats {
            errors: self.errors.get(),
            held_out: self.models.held_out(),
            top_copies,
            ..self.stats.clone()
        };
        self.policy.count(&mut stats);
        stats
    }

    /// What was learned of each model that ran, by kind of GPU. [`Event::Learned`] says it again.
    pub fn learned(&self) -> impl Iterator<Item = Learned> {
        self.models.ran().filter_map(|(slot, kind, run)| {
            let gpu = self.fleet.all().map(|gpu| self.fleet.get(gpu)).find(|gpu| gpu.kind == kind)?;
            let (load, model) = (gpu.transfer_time(&self.models, slot), self.models.get(slot).id);
            let swap = self.models.cost(slot, kind).and_then(|cost| cost.host());
            Some(Learned { model, kind, load, swap, run })
        })
    }

    /// [`Stats::reserved`] alone, which does not look at every model.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        let mut stats = Stats::default();
        self.policy.count(&mut stats);
        stats.reserved
    }

    fn install(&mut self, model: ModelId, memory: Bytes, weights: Bytes) {
        let blocks = blocks_for(memory.max(weights));
        let rank = self.sizes.partition_point(|&size| size < blocks);
        let rank = (rank < self.sizes.len()).then_some(SizeRank(rank));
        self.models.install(model, blocks, weights, rank);
    }

    fn enqueue(&mut self, now: Timestamp, request: Request, actions: &mut Vec<Action>) {
        let Request { key, function, model, attempts, priority, inputs } = request;
        let found = self.models.installed(model).map(|model| (model, self.models.get(model).rank));
        let refuse = match found {
            None => Reason::FunctionNotReady,
            Some((_, None)) => Reason::NoGpuMemory,
            Some(_) if self.queued >= self.queue_max as usize => Reason::QueueFull,
            Some((model, Some(rank))) => {
                self.models.used(model);
                // What was said of all that it stands for holds.
                if !self.rows.contains_key(&key) {
                    self.reads(key, inputs);
                }
                let request = Waiting { key, function, model, rank, attempts, priority, arrived: now };
                return self.queue_up(request, Entry::New);
            }
        };
        self.rows.remove(&key);
        self.inputs.remove(&key);
        actions.push(Action::Fail { key, reason: refuse, may_have_executed: false });
    }

    fn queue_up(&mut self, request: Waiting, entry: Entry) {
        self.places.insert(request.key, Place::Queued { request, reserved: None });
        self.queued += 1;
        self.policy.push(request, entry);
    }

    /// Gives out what can be given out.
    fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while self.queued > 0 {
            let view = View { now, fleet: &self.fleet, models: &self.models, inputs: &self.inputs };
            match self.policy.decide(&view) {
                None => break,
                Some(Decision::Reserve { request, gpu }) => self.reserve(&request, gpu, actions),
                Some(Decision::Refuse { request, reason }) => {
                    self.queued -= 1;
                    self.gone(&request);
                    let may_have_executed = request.attempts.begun;
                    actions.push(Action::Fail { key: request.key, reason, may_have_executed });
                }
                Some(Decision::Assign { request, gpu, over }) => {
                    self.assign(now, request, gpu, over, actions);
                }
            }
        }
        if self.policy.recalls() {
            self.recall(now, actions);
        }
    }
}

impl Core for Dispatch {
    type Event = Event;
    type Action = Action;

    fn decision(action: &Action) -> Option<DecisionText> {
        let named = DecisionText::new;
        Some(match *action {
            Action::Assign { gpu, key, model, .. } => named("assign").request(key).model(model).gpu(gpu),
            Action::Prefetch { gpu, model } => named("prefetch").model(model).gpu(gpu),
            Action::Prewarm { gpu, model } => named("prewarm").model(model).gpu(gpu),
            Action::Recall { gpu, key } => named("recall").request(key).gpu(gpu),
            Action::Cancel { gpu, key } => named("cancel").request(key).gpu(gpu),
            Action::Fail { key, .. } => named("fail").request(key),
            Action::Standing { .. } | Action::Pin { .. } | Action::Unpin { .. } | Action::Keep { .. } => {
                return None;
            }
        })
    }

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        // These free nothing, and nobody goes anywhere for them: what is due by now is left for who looks.
        match event {
            Event::Rows { key, rows, inputs } => return self.stands_for(key, rows, inputs),
            Event::Moved { key, inputs } => return self.moved(key, inputs),
            Event::Withdraw { key } if matches!(self.places.get(&key), Some(Place::On(_))) => {
                return self.withdraw(key, actions);
            }
            _ => self.policy.tick(now, &self.models),
        }
        let loses_a_gpu = matches!(event, Event::Down { .. } | Event::Reset { .. });
        match event {
            Event::Install { model, memory, weights } => self.install(model, memory, weights),
            Event::Keep { model, copies } => self.keep(model, copies, actions),
            Event::Remove { model } => {
                self.keep(model, 0, actions);
                self.models.remove(model);
            }
            Event::Learned(Learned { model, kind, load, swap, run }) => {
                if let Some(slot) = self.models.slot(model) {
                    let before = self.weights(slot, kind);
                    self.models.learn(slot, kind, |cost| cost.learned(load, swap, run));
                    self.reweighed(slot, before, actions);
                }
            }
            Event::Objective { function, objective } => {
                self.policy.objective(function, objective);
                self.policy.tick(now, &self.models);
            }
            Event::Score { function, counts } => self.policy.score(&self.models, function, counts),
            Event::Forget { function } => self.policy.forget(function),
            Event::Enqueue(request) => self.enqueue(now, request, actions),
            Event::Withdraw { key } => self.withdraw(key, actions),
            Event::Up { gpu, incarnation } => {
                self.fleet.change(gpu, |it| it.executor = Some(incarnation));
                self.policy.freed(gpu);
            }
            Event::Down { gpu, lost } => {
                // What the GPU says nothing about was still on its way there.
                let said = |key| lost.iter().find(|(lost, _)| *lost == key).map(|&(_, progress)| progress);
                self.down(gpu, |held, _| said(held.request.key).unwrap_or(Progress::Waiting), actions);
            }
            Event::Reset { gpu } => {
                let worst = |_: &Held, turn| match turn {
                    Turn::Running => Progress::Begun,
                    Turn::Next => Progress::Preparing,
                };
                self.down(gpu, worst, actions);
            }
            Event::Ended { gpu, key, ran } => self.ended(now, gpu, key, ran, actions),
            Event::Returned { gpu, key, why } => self.returned(now, gpu, key, why, actions),
            Event::Loaded { gpu, model, from } => self.loaded(now, gpu, (model, from), actions),
            Event::Evicted { gpu, models } => {
                for model in models {
                    if let Some(model) = self.models.slot(model) {
                        self.fleet.change(gpu, |it| it.remove_resident(model));
                        self.not_kept(now, model, gpu, actions);
                        self.left(model, gpu, actions);
                    }
                }
            }
            Event::Change { policy, eviction, functions } => {
                self.change(now, (policy, eviction), functions, actions);
            }
            Event::Likely { model, after } => self.likely(now, model, after),
            Event::Rows { .. } | Event::Moved { .. } | Event::Tick => {}
        }
        self.pump(now, actions);
        if loses_a_gpu {
            self.bring_homeless(now, actions);
        }
        self.keep_warm(now, actions);
        self.bring_likely(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        [self.look_again, self.policy.next_wake(), self.warm.next_wake()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests;
