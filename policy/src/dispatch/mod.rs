//! Which request goes to which GPU. One core of the Node actor.
//!
//! First come first served over a bounded queue. The oldest request goes to an idle GPU: one that
//! holds its model or is loading it, else the emptiest. Where none is idle, it is handed ahead to a
//! busy GPU that has no next one yet: one that holds its model, else the one that is likely to be
//! free first; so a GPU never waits for a message. A GPU that falls idle with nothing in the queue
//! asks a next one back from a busy neighbour.
//!
//! More than one goes ahead only where that costs nobody anything: to a GPU that holds the model
//! and will begin it sooner than it could be asked back ([`RECALL_COST`]). Where runs take a few
//! microseconds, the wake of an executor is then shared by several of them.
//!
//! A suspect, a request that was around when a GPU was lost, is given a GPU of its own: it is not
//! handed ahead and nobody is handed ahead behind it.
//!
//! ```text
//! Enqueue, Withdraw                      ┌───────┐  Assign, Recall, Cancel
//! ──────────────────────────────────────►│       ├──────────────────────────► Gpu
//! Up, Down, Ended, Returned, Evicted     │       │  Fail
//! ──────────────────────────────────────►│       ├──────────────────────────► Function
//!                                        └───────┘
//! ```

mod gpus;
mod protocol;
mod queue;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, GpuIndex, ModelId, Reason, Timestamp};

pub use self::protocol::{Action, Event, Return};

use self::gpus::{Expected, Gpu, Held};
use self::queue::{Queue, SizeRank, Waiting};
use crate::attempts::{Loss, Progress, Verdict};
use crate::core::Core;
use crate::gpu::SLOTS_MAX;
use crate::ids::RequestKey;
use crate::memory::blocks_for;

/// What asking a request back costs: below that it is left where it is, and a run is not yet late.
pub const RECALL_COST: Duration = Duration::from_micros(200);
/// Requests a GPU has been handed ahead, at most.
pub const AHEAD_MAX: usize = SLOTS_MAX - 1;

/// What a GPU is, for dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuConfig {
    /// Its memory.
    pub memory: Bytes,
    /// How fast models come from the host.
    pub host_rate: BytesPerSec,
}

/// What a node is, for dispatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Its GPUs, in index order.
    pub gpus: Vec<GpuConfig>,
    /// Requests that may wait. Those that come back from a lost GPU may exceed it by
    /// [`SLOTS_MAX`] for each.
    pub queue_max: u32,
}

#[derive(Debug)]
struct Model {
    blocks: u32,
    weights: Bytes,
    /// `None`: no GPU is large enough.
    rank: Option<SizeRank>,
    /// How long a run takes, smoothed over the last ones.
    run_time: Option<Duration>,
}

#[derive(Debug, Clone, Copy)]
enum Turn {
    Running,
    Next,
}

#[derive(Debug, Clone, Copy)]
enum Place {
    Queued(SizeRank),
    On(GpuIndex),
}

/// The node's queue and what it knows of its GPUs.
#[derive(Debug)]
pub struct Dispatch {
    queue_max: u32,
    /// The GPUs' sizes in blocks, smallest first, each once.
    sizes: Vec<u32>,
    gpus: Vec<Gpu>,
    models: BTreeMap<ModelId, Model>,
    queue: Queue,
    places: BTreeMap<RequestKey, Place>,
    /// When to look again whether an idle GPU should ask for a neighbour's next request.
    look_again: Option<Timestamp>,
    fronts: Vec<(SizeRank, Waiting)>,
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
        Self {
            queue_max: config.queue_max,
            gpus: config.gpus.iter().map(|gpu| Gpu::new(rank(gpu), gpu.host_rate)).collect(),
            models: BTreeMap::new(),
            queue: Queue::new(sizes.len()),
            places: BTreeMap::new(),
            look_again: None,
            fronts: Vec::new(),
            sizes,
        }
    }

    /// Requests that wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
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

    fn gpu(&mut self, gpu: GpuIndex) -> &mut Gpu {
        &mut self.gpus[gpu.0 as usize]
    }

    fn install(&mut self, model: ModelId, memory: Bytes, weights: Bytes) {
        let blocks = blocks_for(memory.max(weights));
        let rank = self.sizes.partition_point(|&size| size < blocks);
        let rank = (rank < self.sizes.len()).then_some(SizeRank(rank));
        let run_time = self.models.get(&model).and_then(|model| model.run_time);
        self.models.insert(model, Model { blocks, weights, rank, run_time });
    }

    fn enqueue(&mut self, request: Waiting, actions: &mut Vec<Action>) {
        let refuse = match self.models.get(&request.model) {
            None => Reason::FunctionNotReady,
            Some(Model { rank: None, .. }) => Reason::NoGpuMemory,
            Some(_) if self.queue.len() >= self.queue_max as usize => Reason::QueueFull,
            Some(&Model { rank: Some(rank), .. }) => return self.queue_up(rank, request),
        };
        actions.push(Action::Fail { key: request.key, reason: refuse, may_have_executed: false });
    }

    fn queue_up(&mut self, rank: SizeRank, request: Waiting) {
        self.places.insert(request.key, Place::Queued(rank));
        self.queue.insert(rank, request);
    }

    fn withdraw(&mut self, key: RequestKey, actions: &mut Vec<Action>) {
        match self.places.get(&key).copied() {
            Some(Place::Queued(rank)) => {
                self.queue.remove(rank, key);
                self.places.remove(&key);
            }
            Some(Place::On(gpu)) => {
                if let Some(held) = self.gpu(gpu).held_mut(key) {
                    held.withdrawn = true;
                    actions.push(Action::Cancel { gpu, key });
                }
            }
            None => {}
        }
    }

    /// Takes a request off a GPU.
    fn take_off(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) -> Option<Held> {
        let held = self.gpu(gpu).remove(now, key)?;
        self.places.remove(&key);
        Some(held)
    }

    fn ended(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey, ran: Option<Duration>) {
        let Some(held) = self.take_off(now, gpu, key) else { return };
        if let (Some(ran), Some(model)) = (ran, self.models.get_mut(&held.request.model)) {
            // A quarter of the new, three of the old: settles within a few runs, shrugs off one.
            model.run_time = Some(model.run_time.map_or(ran, |old| (old * 3 + ran) / 4));
        }
    }

    fn returned(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        key: RequestKey,
        why: Return,
        actions: &mut Vec<Action>,
    ) {
        let Some(held) = self.take_off(now, gpu, key) else { return };
        match why {
            Return::Recalled if held.withdrawn => {}
            Return::Recalled => self.queue_up(held.rank, held.request),
            Return::Failed(progress) => self.lost(held, Loss::Failed(progress), actions),
        }
    }

    fn lost(&mut self, held: Held, loss: Loss, actions: &mut Vec<Action>) {
        if held.withdrawn {
            return;
        }
        match held.request.attempts.after(loss) {
            Verdict::Again(attempts) => self.queue_up(held.rank, Waiting { attempts, ..held.request }),
            Verdict::Refuse { reason, may_have_executed } => {
                actions.push(Action::Fail { key: held.request.key, reason, may_have_executed });
            }
        }
    }

    fn down(&mut self, gpu: GpuIndex, progress: impl Fn(&Held, Turn) -> Progress, actions: &mut Vec<Action>) {
        let gone = self.gpu(gpu);
        gone.executor = None;
        gone.clear_resident();
        let running = gone.running.take().map(|held| (held, Turn::Running));
        let ahead = std::mem::take(&mut gone.ahead).into_iter().map(|held| (held, Turn::Next));
        for (held, turn) in running.into_iter().chain(ahead) {
            self.places.remove(&held.request.key);
            self.lost(held, Loss::Died(progress(&held, turn)), actions);
        }
    }

    /// Gives out what can be given out.
    fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while let Some((rank, request, gpu)) = self.match_one(now) {
            self.assign(now, rank, request, gpu, actions);
        }
        self.recall(now, actions);
    }

    /// The oldest request that can go somewhere, and where.
    fn match_one(&mut self, now: Timestamp) -> Option<(SizeRank, Waiting, GpuIndex)> {
        if self.queue.len() == 0 {
            return None;
        }
        let mut fronts = std::mem::take(&mut self.fronts);
        self.queue.fronts(&mut fronts);
        let place = |&(rank, request): &(SizeRank, Waiting)| {
            let gpu = self.idle_gpu(rank, request.model).or_else(|| self.busy_gpu(now, rank, &request))?;
            Some((rank, request, gpu))
        };
        let found = fronts.iter().find_map(place);
        self.fronts = fronts;
        found
    }

    fn indexed(&self) -> impl Iterator<Item = (GpuIndex, &Gpu)> {
        (0..).map(GpuIndex).zip(&self.gpus)
    }

    fn idle_gpu(&self, rank: SizeRank, model: ModelId) -> Option<GpuIndex> {
        let idle = self.indexed().filter(|(_, gpu)| gpu.idle() && gpu.rank >= rank);
        let best = idle.min_by_key(|(_, gpu)| (!gpu.holds(model), gpu.resident_blocks()))?;
        Some(best.0)
    }

    fn busy_gpu(&self, now: Timestamp, rank: SizeRank, request: &Waiting) -> Option<GpuIndex> {
        if request.attempts.suspect() {
            return None;
        }
        let busy = self.indexed().filter(|(_, gpu)| gpu.takes_ahead() && gpu.rank >= rank);
        let turns = busy.map(|(index, gpu)| (index, gpu, self.expected_free(now, gpu, gpu.ahead.len())));
        let takers = turns.filter(|(_, gpu, turn)| {
            let soon = *turn <= Expected::At(now + RECALL_COST);
            gpu.ahead.is_empty() || (soon && gpu.ahead.len() < AHEAD_MAX && gpu.holds(request.model))
        });
        let best = takers.min_by_key(|&(_, gpu, turn)| (!gpu.holds(request.model), turn))?;
        Some(best.0)
    }

    /// When a GPU is through with what it runs and the first `ahead` that it was handed ahead.
    fn expected_free(&self, now: Timestamp, gpu: &Gpu, ahead: usize) -> Expected {
        let takes = |held: &Held| Some(held.swap + self.models.get(&held.request.model)?.run_time?);
        let running = gpu.running.as_ref().and_then(|held| Some(held.since + takes(held)?));
        let Some(free) = running.filter(|&free| free + RECALL_COST > now) else { return Expected::Unknown };
        let rest: Option<Duration> = gpu.ahead.iter().take(ahead).map(takes).sum();
        rest.map_or(Expected::Unknown, |rest| Expected::At(free.max(now) + rest))
    }

    fn assign(
        &mut self,
        now: Timestamp,
        rank: SizeRank,
        request: Waiting,
        to: GpuIndex,
        actions: &mut Vec<Action>,
    ) {
        let Waiting { key, model, attempts } = request;
        self.queue.remove(rank, key);
        self.places.insert(key, Place::On(to));
        let (blocks, weights) = self.models.get(&model).map_or((0, Bytes::ZERO), |m| (m.blocks, m.weights));
        let gpu = self.gpu(to);
        let incarnation = gpu.executor.expect("only GPUs with an executor are chosen");
        let swap = gpu.swap_time(model, weights);
        gpu.add_resident(model, blocks);
        let held = Held { request, rank, since: now, swap, recalled: false, withdrawn: false };
        if gpu.running.is_none() {
            gpu.running = Some(held);
        } else {
            gpu.ahead.push_back(held);
        }
        actions.push(Action::Assign { gpu: to, key, model, incarnation, attempt: attempts.lost + 1 });
    }

    /// Asks a next request back for each GPU that is idle, where that serves it sooner.
    fn recall(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.look_again = None;
        if !self.gpus.iter().any(|gpu| gpu.askable().is_some()) {
            return;
        }
        let coming = self.gpus.iter().map(Gpu::asked).sum();
        let idle: Vec<GpuIndex> =
            self.indexed().filter(|(_, gpu)| gpu.idle()).map(|(index, _)| index).skip(coming).collect();
        for to in idle {
            let Some((from, place)) = self.recall_from(now, to) else { continue };
            let asked = &mut self.gpu(from).ahead[place];
            asked.recalled = true;
            let key = asked.request.key;
            actions.push(Action::Recall { gpu: from, key });
        }
    }

    /// The request, by GPU and place, that waits longest for its turn, of the last on each GPU and
    /// of those that `to` would serve sooner.
    fn recall_from(&mut self, now: Timestamp, to: GpuIndex) -> Option<(GpuIndex, usize)> {
        let mut best: Option<(Expected, GpuIndex, usize)> = None;
        let mut look_again: Option<Timestamp> = None;
        let idle = &self.gpus[to.0 as usize];
        for (from, gpu) in self.indexed() {
            let Some(place) = gpu.askable().filter(|&place| gpu.ahead[place].rank <= idle.rank) else {
                continue;
            };
            let model = gpu.ahead[place].request.model;
            let weights = self.models.get(&model).map_or(Bytes::ZERO, |model| model.weights);
            let there = Expected::At(now + idle.swap_time(model, weights) + RECALL_COST);
            let turn = self.expected_free(now, gpu, place);
            if turn > there {
                best = best.max(Some((turn, from, place)));
            } else if let Expected::At(at) = self.expected_free(now, gpu, 0) {
                // Should what runs take longer than expected, the idle GPU takes over after all.
                let late = at + RECALL_COST;
                look_again = Some(look_again.map_or(late, |other| other.min(late)));
            }
        }
        if best.is_none()
            && let Some(at) = look_again
        {
            self.look_again = Some(self.look_again.map_or(at, |other| other.min(at)));
        }
        best.map(|(_, from, place)| (from, place))
    }
}

impl Core for Dispatch {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Install { model, memory, weights } => self.install(model, memory, weights),
            Event::Remove { model } => {
                self.models.remove(&model);
            }
            Event::Enqueue { key, model, attempts } => {
                self.enqueue(Waiting { key, model, attempts }, actions)
            }
            Event::Withdraw { key } => self.withdraw(key, actions),
            Event::Up { gpu, incarnation } => self.gpu(gpu).executor = Some(incarnation),
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
            Event::Ended { gpu, key, ran } => self.ended(now, gpu, key, ran),
            Event::Returned { gpu, key, why } => self.returned(now, gpu, key, why, actions),
            Event::Evicted { gpu, models } => {
                for model in models {
                    self.gpu(gpu).remove_resident(model);
                }
            }
            Event::Tick => {}
        }
        self.pump(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.look_again
    }
}

#[cfg(test)]
mod tests;
