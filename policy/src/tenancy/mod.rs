//! Keeps tenants within their caps (L20): stands before the node's queue, and lets a tenant's
//! requests into it only as far as its caps allow. What is beyond waits outside, so that no policy
//! of [`crate::dispatch`] need know of tenants, and others' requests pass it by.
//!
//! ```text
//!   Quota, Owner                who has caps, and whose a function is
//!   Enqueue ─► parked ─► let in ─► Dispatch ─► Assign, …
//!                 ▲                   │
//!                 └── Ended, Down ◄───┘    makes room for the next
//! ```
//!
//! | cap | what it bounds on this node | when it holds |
//! |---|---|---|
//! | `gpus_max` | GPUs that work for the tenant at once: its requests inside, each of which takes one GPU at most | always |
//! | `memory_share` | GPU memory for the models of its requests inside, each on a GPU of its own at worst. What is only left on a GPU is anyone's to evict, and not counted | always |
//! | `gpu_share` | its requests inside, by the GPUs, rounded up; and GPU time in the last [`WINDOW`], swapping included | where others need the rest |
//!
//! **The share of time.** Beyond it a tenant is let in only while nobody waits inside who is within
//! their share, or has none; and only to GPUs that the others can do without: those that they did not
//! use at once at any moment of the last [`WINDOW`]. For no run is taken back, so a GPU has to be idle
//! already when somebody comes who is not to notice the others (L20: less than a tenth of the p99). A
//! tenant that is alone has every GPU, and one that comes after a while waits for a run, once. What
//! others need is what they had inside at the most, each up to their own shares; who had more than its
//! share of the window counts with what it has inside now. The paper says no more than that shares can
//! be capped.
//!
//! A tenant that is over its share is also let in where those who wait inside leave a GPU idle that
//! none of them can use. A tenant with any cap has one request inside for each GPU at most: what was
//! let in is not taken back, and whoever is within their share then waits for the runs under way, not
//! for a queue.
//!
//! The oldest of a tenant comes in first; one that does not fit yet holds up the younger of the same
//! tenant. One that can never fit its tenant's share of the memory fails with `NO_GPU_MEMORY`.
//!
//! **Bound.** Half the node's queue ([`Config::queue_max`]) may wait outside, of all tenants with
//! caps; so these never fill the queue of the others. Where one more has to wait, the newest request
//! of whichever tenant has the most outside fails with `QUEUE_FULL`: no tenant takes the place of
//! another with fewer, and each may have all of it while nobody else needs it. What may come in at once
//! never counts, and nothing comes in while the queue is full.
//!
//! **Cost.** A decision grows with the tenants that have caps, not with what waits. Without any caps
//! nothing is parked and nothing is counted but who is on which GPU.
//!
//! Not here: caps over several nodes (each keeps to them by itself), and requests that were here
//! before their tenant had a cap: those are served as they would have been.

mod gate;
mod protocol;
mod window;

use std::collections::{BTreeMap, VecDeque};

use millrace_types::{GpuIndex, ModelId, Reason, Timestamp};

pub use self::protocol::Event;
pub use self::window::WINDOW;

use self::gate::{Gate, Parked, Whole};
use self::window::moves_on;
use crate::core::Core;
use crate::dispatch::{self, Action, Config, Dispatch};
use crate::ids::{FunctionIndex, RequestKey};
use crate::memory::blocks_for;

/// What is on a GPU, in the order in which it came: the first has its turn.
#[derive(Debug, Default)]
struct OnGpu {
    up: bool,
    requests: VecDeque<RequestKey>,
}

/// The node's queue behind its gate.
#[derive(Debug)]
pub struct Tenancy {
    dispatch: Dispatch,
    gate: Gate,
    gpus: Vec<OnGpu>,
    /// How many of them are up.
    up: u32,
    /// When more of a share may be free for those who wait outside.
    look_again: Option<Timestamp>,
    /// The memory of each model that may be asked for.
    models: BTreeMap<ModelId, u32>,
    queue_max: usize,
    parked_max: usize,
}

impl Tenancy {
    /// An empty queue; no GPU is up yet, and no tenant has a cap.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let gpus: Vec<_> = config.gpus.iter().map(|_| OnGpu::default()).collect();
        let blocks = config.gpus.iter().map(|gpu| u64::from(blocks_for(gpu.memory))).sum();
        let whole = Whole { gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX), blocks };
        Self {
            dispatch: Dispatch::new(config),
            gate: Gate::new(whole),
            gpus,
            up: 0,
            look_again: None,
            models: BTreeMap::new(),
            queue_max: config.queue_max as usize,
            parked_max: (config.queue_max as usize / 2).max(1),
        }
    }

    /// The queue itself.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatch {
        &self.dispatch
    }

    /// Requests that wait, outside or inside.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.dispatch.queued() + self.gate.parked()
    }

    /// Whether a request waits or is on a GPU.
    #[must_use]
    pub fn holds(&self, key: RequestKey) -> bool {
        self.gate.holds(key) || self.dispatch.holds(key)
    }

    /// Whether a function's tenant has caps.
    #[must_use]
    pub fn owned(&self, function: FunctionIndex) -> bool {
        self.gate.owner(function).is_some()
    }

    /// Whether a model is more than its function's tenant may ever have of the memory.
    #[must_use]
    pub fn over_memory_share(&self, function: FunctionIndex, model: ModelId) -> bool {
        let blocks = self.models.get(&model).copied().unwrap_or(0);
        self.gate.owner(function).is_some_and(|tenant| self.gate.never_fits(tenant, blocks))
    }

    fn pass(&mut self, now: Timestamp, event: dispatch::Event, actions: &mut Vec<Action>) {
        match event {
            dispatch::Event::Enqueue(request) => {
                let Some(tenant) = self.gate.owner(request.function) else {
                    return self.forward(now, event, actions);
                };
                // Of a model that is not here nothing is known, but dispatch refuses it.
                let blocks = self.models.get(&request.model).copied().unwrap_or(0);
                self.gate.park(tenant, Parked { request, blocks });
            }
            dispatch::Event::Withdraw { key } => {
                if self.gate.unpark(key).is_none() {
                    self.forward(now, event, actions);
                    self.forget_unless_held(now, key);
                }
            }
            dispatch::Event::Moved { key, inputs } => {
                if !self.gate.reads(key, inputs) {
                    self.forward(now, event, actions);
                }
            }
            // Dispatch knows of one that waits outside while it stands for several, and no longer.
            dispatch::Event::Rows { key, inputs, .. } => {
                self.gate.reads(key, inputs);
                self.forward(now, event, actions);
            }
            dispatch::Event::Ended { gpu, key, .. } | dispatch::Event::Returned { gpu, key, .. } => {
                self.left(now, gpu, key);
                self.forward(now, event, actions);
                self.forget_unless_held(now, key);
            }
            dispatch::Event::Down { gpu, .. } | dispatch::Event::Reset { gpu } => {
                let lost: Vec<_> = self.gpus[gpu.0 as usize].requests.iter().copied().collect();
                lost.iter().for_each(|&key| self.left(now, gpu, key));
                self.up -= u32::from(std::mem::take(&mut self.gpus[gpu.0 as usize].up));
                self.forward(now, event, actions);
                lost.into_iter().for_each(|key| self.forget_unless_held(now, key));
            }
            dispatch::Event::Up { gpu, .. } => {
                self.up += u32::from(!std::mem::replace(&mut self.gpus[gpu.0 as usize].up, true));
                self.forward(now, event, actions);
            }
            dispatch::Event::Install { model, memory, weights } => {
                self.models.insert(model, blocks_for(memory.max(weights)));
                self.forward(now, event, actions);
            }
            dispatch::Event::Remove { model } => {
                self.models.remove(&model);
                self.forward(now, event, actions);
            }
            event => self.forward(now, event, actions),
        }
    }

    /// Tells dispatch, and sees what it does.
    fn forward(&mut self, now: Timestamp, event: dispatch::Event, actions: &mut Vec<Action>) {
        let before = actions.len();
        self.dispatch.wait_outside(self.gate.parked());
        self.dispatch.on_event(now, event, actions);
        for action in &actions[before..] {
            match *action {
                Action::Assign { gpu, key, .. } => {
                    let requests = &mut self.gpus[gpu.0 as usize].requests;
                    requests.push_back(key);
                    self.gate.moved(key, Some(gpu));
                    if requests.len() == 1 {
                        self.gate.turn_began(now, key, gpu);
                    }
                }
                Action::Fail { key, .. } => self.gate.gone(now, key),
                _ => {}
            }
        }
    }

    fn left(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) {
        let requests = &mut self.gpus[gpu.0 as usize].requests;
        let Some(place) = requests.iter().position(|&on| on == key) else { return };
        requests.remove(place);
        if place == 0 {
            self.gate.turn_ended(now, key, gpu);
            if let Some(&next) = requests.front() {
                self.gate.turn_began(now, next, gpu);
            }
        }
        self.gate.moved(key, None);
    }

    fn forget_unless_held(&mut self, now: Timestamp, key: RequestKey) {
        if !self.dispatch.holds(key) {
            self.gate.gone(now, key);
        }
    }

    /// Lets in whoever may come in now.
    fn let_in(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while self.gate.parked() > 0
            && let Some(key) = self.gate.hopeless()
        {
            self.gate.unpark(key);
            actions.push(Action::Fail { key, reason: Reason::NoGpuMemory, may_have_executed: false });
        }
        while self.may_let_in()
            && let Some(key) = self.gate.next(now, self.dispatch.queued(), self.up)
        {
            self.enter(now, key, actions);
        }
        // What is idle now is of no use to those who wait inside.
        while self.may_let_in()
            && self.gpus.iter().any(|gpu| gpu.up && gpu.requests.is_empty())
            && let Some(key) = self.gate.next_for_idle(now, self.dispatch.queued())
        {
            self.enter(now, key, actions);
            if self.gate.waits(key) {
                return;
            }
        }
    }

    fn may_let_in(&self) -> bool {
        self.gate.parked() > 0 && self.dispatch.queued() < self.queue_max
    }

    /// Fails what is too much outside.
    fn turn_away(&mut self, actions: &mut Vec<Action>) {
        while self.gate.parked() > self.parked_max
            && let Some(key) = self.gate.newest_of_most()
        {
            self.gate.unpark(key);
            actions.push(Action::Fail { key, reason: Reason::QueueFull, may_have_executed: false });
        }
    }

    fn enter(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(tenant) = self.gate.tenant_of(key) else { return };
        let Some(parked) = self.gate.unpark(key) else { return };
        self.gate.entered(now, tenant, &parked);
        self.forward(now, dispatch::Event::Enqueue(parked.request), actions);
    }
}

impl Core for Tenancy {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Dispatch(event) => self.pass(now, event, actions),
            Event::Quota { tenant, quota } => self.gate.set(tenant, quota),
            Event::Owner { function, tenant } => self.gate.own(function, tenant),
        }
        self.gate.count(now, self.dispatch.in_flight());
        self.let_in(now, actions);
        self.turn_away(actions);
        self.look_again = (self.gate.parked() > 0).then(|| moves_on(now));
    }

    fn next_wake(&self) -> Option<Timestamp> {
        [self.look_again, self.dispatch.next_wake()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests;
