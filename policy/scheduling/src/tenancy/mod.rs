//! Tenant caps (L20): a gate before the node's queue that admits a tenant's requests only as far as
//! the tenant's caps allow. Requests beyond the caps are parked outside the queue, so the policies
//! of [`crate::dispatch`] need not know about tenants, and requests of other tenants pass the
//! parked ones.
//!
//! ```text
//!   Quota, Owner                caps of tenants, and tenants of functions
//!   Enqueue ─► parked ─► let in ─► Dispatch ─► Assign, …
//!                 ▲                   │
//!                 └── Ended, Down ◄───┘    frees capacity for the next
//! ```
//!
//! | cap | bounds on this node | applies |
//! |---|---|---|
//! | `gpus_max` | GPUs that work for the tenant at once: its admitted requests, each of which occupies at most one GPU | always |
//! | `memory_share` | GPU memory for the models of its admitted requests, in the worst case each on a GPU of its own. Idle copies can be evicted for any tenant and do not count | always |
//! | `gpu_share` | its admitted requests as a share of the GPUs, rounded up; and GPU time in the last [`WINDOW`], swaps included | while others need the rest |
//!
//! **The share of GPU time.** Beyond its share, a tenant is admitted only while no request waits in
//! the queue from a tenant within its share, or from a tenant without a share. Even then, the
//! tenant gets only the GPUs that the others can spare: GPUs that the others did not use at once
//! at any moment of the last [`WINDOW`]. No run is preempted, so a GPU has to be idle already when
//! a request arrives that must not notice the other tenants (L20: less than a tenth of the p99). A
//! tenant that is alone gets every GPU, and a tenant that comes after a while waits for a run,
//! once. The need of the other tenants is the maximum of their admitted requests, each up to its
//! own share; a tenant that used more than its share of the window counts with the requests
//! admitted now. The paper only says that shares can be capped.
//!
//! A tenant over its share is also admitted if the waiting requests of others leave a GPU idle that
//! none of them can use. A tenant with any cap has at most one admitted request for each GPU: an
//! admitted request is never taken back, so a tenant within its share then waits for the runs under
//! way, not for a queue.
//!
//! A tenant's oldest request is admitted first; while it does not fit, the younger requests of the
//! tenant wait. A request that can never fit its tenant's memory share fails with `NO_GPU_MEMORY`.
//!
//! **Bound.** All tenants with caps together may park half the node's queue bound
//! ([`Config::queue_max`]), so they never fill the queue of the others. If a further request has to
//! be parked, the newest request of the tenant with most parked requests fails with `QUEUE_FULL`.
//! So no tenant takes the capacity of a tenant with fewer parked requests, and each may use the
//! whole bound while no other tenant needs capacity. A request that is admitted at once does not
//! count, and no request is admitted while the queue is full.
//!
//! **Complexity.** The cost of a decision grows with the tenants that have caps, not with the
//! waiting requests. Without caps the gate parks nothing and only tracks the requests on each GPU.
//!
//! Deliberately absent: caps across nodes (each node enforces the caps by itself), and caps on
//! requests that arrived before their tenant had a cap.

mod gate;
mod protocol;
mod window;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::ops::Range;

use millrace_types::{GpuIndex, ModelId, Reason, Timestamp};

pub use self::protocol::Event;
pub use self::window::WINDOW;

use self::gate::{ParkedRequest, SharedCapacity, TenantAccounts};
use self::window::moves_on;
use crate::dispatch::{self, Action, Config, Dispatcher, GpuConfig};
use millrace_core::Core;
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};
use millrace_memory::BlockSize;

/// Requests on a seat in order of assignment: the first request has its turn.
type SeatRequests = VecDeque<RequestKey>;

/// Requests on a GPU.
#[derive(Debug)]
struct OnGpu {
    up: bool,
    /// Numbers of the open seats.
    open_seats: Range<u32>,
    /// Number of seats, open or closed.
    seats_max: u32,
    /// Seats with requests.
    seats: BTreeMap<SeatIndex, SeatRequests>,
}

impl OnGpu {
    fn has_idle_seat(&self) -> bool {
        let open = SeatIndex(self.open_seats.start)..SeatIndex(self.open_seats.end);
        self.up && self.seats.range(open).count() < self.open_seats.len()
    }

    /// Opens the first `seats` seats, and closes the others.
    fn open_seats(&mut self, seats: NonZeroU32) {
        self.open_seats.end = self.open_seats.start + self.seats_max.min(seats.get());
    }

    /// Returns all requests, by seat and in order of assignment.
    fn requests(&self) -> Vec<RequestKey> {
        self.seats.values().flatten().copied().collect()
    }
}

/// The node's queue behind the gate.
#[derive(Debug)]
pub struct TenantGate {
    dispatch: Dispatcher,
    gate: TenantAccounts,
    gpus: Vec<OnGpu>,
    /// Number of GPUs that are up.
    up: u32,
    /// Time at which the window frees more of a share for parked requests.
    look_again: Option<Timestamp>,
    /// Unit of memory shares: the largest block of the node's GPUs.
    block: BlockSize,
    /// Blocks of each installed model.
    models: BTreeMap<ModelId, u32>,
    queue_max: usize,
    parked_max: usize,
}

impl TenantGate {
    /// Creates an empty queue, with all GPUs down and no caps.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut seat_count = 0;
        let on_gpu = |gpu: &GpuConfig| {
            let first_seat = seat_count;
            seat_count += gpu.seat_count();
            OnGpu {
                up: false,
                open_seats: first_seat..first_seat + gpu.open_seat_count(config.open_seats),
                seats_max: gpu.seat_count(),
                seats: BTreeMap::new(),
            }
        };
        let gpus: Vec<_> = config.gpus.iter().map(on_gpu).collect();
        let block = config.gpus.iter().map(|gpu| gpu.block).max().unwrap_or_default();
        let blocks = config.gpus.iter().map(|gpu| u64::from(block.blocks_for(gpu.memory))).sum();
        let whole = SharedCapacity { gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX), blocks };
        Self {
            dispatch: Dispatcher::new(config),
            gate: TenantAccounts::new(whole),
            gpus,
            up: 0,
            look_again: None,
            block,
            models: BTreeMap::new(),
            queue_max: config.queue_max as usize,
            parked_max: (config.queue_max as usize / 2).max(1),
        }
    }

    /// Returns the queue behind the gate.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatcher {
        &self.dispatch
    }

    /// Returns the number of waiting requests, parked or queued.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.dispatch.queued() + self.gate.parked()
    }

    /// Returns whether a request waits or is on a GPU.
    #[must_use]
    pub fn holds(&self, key: RequestKey) -> bool {
        self.gate.holds(key) || self.dispatch.holds(key)
    }

    /// Returns whether a function's tenant has caps.
    #[must_use]
    pub fn has_capped_owner(&self, function: FunctionIndex) -> bool {
        self.gate.owner(function).is_some()
    }

    /// Returns whether a model exceeds the memory share of its function's tenant.
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
                // The size of an uninstalled model is unknown, but dispatch refuses the request
                // anyway.
                let blocks = self.models.get(&request.model).copied().unwrap_or(0);
                self.gate.park(tenant, ParkedRequest { request, blocks });
            }
            dispatch::Event::Withdraw { key } => {
                if self.gate.unpark(key).is_none() {
                    self.forward(now, event, actions);
                    self.forget_unless_held(now, key);
                }
            }
            dispatch::Event::InputsMoved { key, inputs } => {
                if !self.gate.reads(key, inputs) {
                    self.forward(now, event, actions);
                }
            }
            // Dispatch tracks the rows of a parked request too.
            dispatch::Event::BatchChanged { key, inputs, .. } => {
                self.gate.reads(key, inputs);
                self.forward(now, event, actions);
            }
            dispatch::Event::RequestEnded { gpu, key, .. }
            | dispatch::Event::RequestReturned { gpu, key, .. } => {
                self.left(now, gpu, key);
                self.forward(now, event, actions);
                self.forget_unless_held(now, key);
            }
            dispatch::Event::Down { gpu, .. } | dispatch::Event::Reset { gpu } => {
                let lost = self.gpus[gpu.0 as usize].requests();
                lost.iter().for_each(|&key| self.left(now, gpu, key));
                self.up -= u32::from(std::mem::take(&mut self.gpus[gpu.0 as usize].up));
                self.forward(now, event, actions);
                lost.into_iter().for_each(|key| self.forget_unless_held(now, key));
            }
            dispatch::Event::Up { gpu, .. } => {
                self.up += u32::from(!std::mem::replace(&mut self.gpus[gpu.0 as usize].up, true));
                self.forward(now, event, actions);
            }
            dispatch::Event::SeatsOpened { seats } => {
                self.gpus.iter_mut().for_each(|gpu| gpu.open_seats(seats));
                self.forward(now, event, actions);
            }
            dispatch::Event::Install { model, memory, weights } => {
                self.models.insert(model, self.block.blocks_for(memory.max(weights)));
                self.forward(now, event, actions);
            }
            dispatch::Event::Remove { model } => {
                self.models.remove(&model);
                self.forward(now, event, actions);
            }
            event => self.forward(now, event, actions),
        }
    }

    /// Forwards an event to dispatch, and accounts for the resulting actions.
    fn forward(&mut self, now: Timestamp, event: dispatch::Event, actions: &mut Vec<Action>) {
        let before = actions.len();
        self.dispatch.set_parked_requests(self.gate.parked());
        self.dispatch.on_event(now, event, actions);
        for action in &actions[before..] {
            match *action {
                Action::Assign { gpu, seat, key, .. } => {
                    let requests = self.gpus[gpu.0 as usize].seats.entry(seat).or_default();
                    requests.push_back(key);
                    self.gate.moved(key, Some(gpu));
                    if requests.len() == 1 {
                        self.gate.turn_began(now, key, seat);
                    }
                }
                Action::Fail { key, .. } => self.gate.gone(now, key),
                _ => {}
            }
        }
    }

    fn left(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) {
        let seats = self.gpus[gpu.0 as usize].seats.iter_mut();
        let place = |requests: &SeatRequests| requests.iter().position(|&on| on == key);
        let mut found = seats.filter_map(|(&seat, requests)| Some((seat, place(requests)?, requests)));
        let Some((seat, place, requests)) = found.next() else { return };
        requests.remove(place);
        if place == 0 {
            self.gate.turn_ended(now, key, seat);
            match requests.front() {
                Some(&next) => self.gate.turn_began(now, next, seat),
                None => drop(self.gpus[gpu.0 as usize].seats.remove(&seat)),
            }
        }
        self.gate.moved(key, None);
    }

    fn forget_unless_held(&mut self, now: Timestamp, key: RequestKey) {
        if !self.dispatch.holds(key) {
            self.gate.gone(now, key);
        }
    }

    /// Admits all parked requests that may enter the queue now.
    fn admit_parked(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while self.gate.parked() > 0
            && let Some(key) = self.gate.oversized_request()
        {
            self.gate.unpark(key);
            actions.push(Action::Fail { key, reason: Reason::NoGpuMemory, may_have_executed: false });
        }
        while self.may_let_in()
            && let Some(key) = self.gate.next(now, self.dispatch.queued(), self.up)
        {
            self.enter(now, key, actions);
        }
        // The requests in the queue cannot use the seats that are idle now.
        while self.may_let_in()
            && self.gpus.iter().any(OnGpu::has_idle_seat)
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

    /// Fails the parked requests beyond the bound.
    fn fail_excess_parked(&mut self, actions: &mut Vec<Action>) {
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

impl Core for TenantGate {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Dispatch(event) => self.pass(now, event, actions),
            Event::Quota { tenant, quota } => self.gate.set(tenant, quota),
            Event::Owner { function, tenant } => self.gate.own(function, tenant),
        }
        self.gate.count(now, self.dispatch.in_flight());
        self.admit_parked(now, actions);
        self.fail_excess_parked(actions);
        self.look_again = (self.gate.parked() > 0).then(|| moves_on(now));
    }

    fn next_wake(&self) -> Option<Timestamp> {
        [self.look_again, self.dispatch.next_wake()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests;
