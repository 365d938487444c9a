//! Baselines that bind functions early (T28): a function is bound to a GPU, and its requests wait
//! for that GPU alone, even while other GPUs are idle.
//!
//! | name | lifetime of the binding | GPU memory | without free memory |
//! |---|---|---|---|
//! | `native` | permanent | the model and a runtime of its own | request refused |
//! | `nonswap` | permanent | the model | request refused |
//! | `infless-ka` | until the function had no request for the keep-alive time | the model and a runtime of its own | request waits |
//!
//! A function is bound at its first request, to the GPU with most free memory, and can run there
//! after its cold start. An idle seat of a GPU takes the oldest of the requests bound to the GPU.
//!
//! The Torpor paper names these baselines and gives no further details (§7.3, §7.4). The memory of
//! a runtime and the duration of a cold start belong to the device and its framework, which
//! dispatch cannot observe: [`BoundConfig`] has both as assumptions. The model is copied after the
//! cold start, as for any other policy. INFless derives keep-alive times from each function's
//! history; ours is the same for all functions, counted from the assignment of the last request.
//! `simpleswap`, the paper's third baseline, binds late, and is `torpor` by age onto any idle GPU.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{Bytes, GpuIndex, Reason, Timestamp};

use super::config::{BindingLifetime, BoundConfig, GpuConfig};
use super::models::ModelTable;
use super::policy::{CopyOrigin, DispatchDecision, DispatchPolicy, DispatchView, QueueEntry};
use super::queue::WaitingRequest;
use super::size_rank::SizeRank;
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};

/// Binding of a function to a GPU.
#[derive(Debug)]
struct FunctionBinding {
    gpu: GpuIndex,
    /// Size of the function's blocks on the GPU.
    size: Bytes,
    /// End of the cold start.
    ready: Timestamp,
    /// Requests that wait for the end of the cold start.
    cold: BTreeMap<RequestKey, WaitingRequest>,
    /// Number of requests that wait for the GPU or for the end of the cold start.
    waiting: usize,
    /// End of the keep-alive time, while no request waits.
    expires: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct EarlyBinding {
    config: BoundConfig,
    functions: BTreeMap<FunctionIndex, FunctionBinding>,
    /// Requests of functions that are not bound.
    unbound: BTreeMap<FunctionIndex, BTreeMap<RequestKey, WaitingRequest>>,
    /// Functions that are not bound, by their oldest request.
    by_age: BTreeSet<(RequestKey, FunctionIndex)>,
    /// Whether a function that could not be bound before might be bound now.
    look: bool,
    /// Requests that wait for each GPU.
    own: Vec<BTreeMap<RequestKey, WaitingRequest>>,
    gpus: Vec<GpuConfig>,
    /// Unbound memory of each GPU.
    room: Vec<Bytes>,
    /// GPUs by unbound memory, most first.
    by_room: BTreeSet<(Reverse<Bytes>, GpuIndex)>,
    /// Functions in their cold start, by its end.
    starting: BTreeSet<(Timestamp, FunctionIndex)>,
    /// Functions without requests, by the end of their keep-alive time.
    expiring: BTreeSet<(Timestamp, FunctionIndex)>,
    /// GPUs that may accept the next request bound to them.
    ready: BTreeSet<GpuIndex>,
    now: Timestamp,
}

impl EarlyBinding {
    pub(super) fn new(config: BoundConfig, gpus: &[GpuConfig]) -> Self {
        let room: Vec<Bytes> = gpus.iter().map(GpuConfig::usable).collect();
        let by_room = (0..).map(GpuIndex).zip(&room).map(|(gpu, &room)| (Reverse(room), gpu));
        Self {
            config,
            functions: BTreeMap::new(),
            unbound: BTreeMap::new(),
            by_age: BTreeSet::new(),
            look: false,
            own: vec![BTreeMap::new(); gpus.len()],
            by_room: by_room.collect(),
            gpus: gpus.to_vec(),
            room,
            starting: BTreeSet::new(),
            expiring: BTreeSet::new(),
            ready: BTreeSet::new(),
            now: Timestamp::ZERO,
        }
    }

    /// Adds a request of a function that is not bound.
    fn wait_unbound(&mut self, request: WaitingRequest) {
        let its = self.unbound.entry(request.function).or_default();
        if let Some((&oldest, _)) = its.first_key_value() {
            self.by_age.remove(&(oldest, request.function));
        }
        its.insert(request.key, request);
        if let Some((&oldest, _)) = its.first_key_value() {
            self.by_age.insert((oldest, request.function));
        }
        self.look = true;
    }

    /// Removes and returns the requests of a function that is not bound.
    fn take_unbound(&mut self, function: FunctionIndex) -> BTreeMap<RequestKey, WaitingRequest> {
        let its = self.unbound.remove(&function).unwrap_or_default();
        if let Some((&oldest, _)) = its.first_key_value() {
            self.by_age.remove(&(oldest, function));
        }
        its
    }

    fn set_room(&mut self, gpu: GpuIndex, change: impl FnOnce(Bytes) -> Bytes) {
        let room = &mut self.room[gpu.0 as usize];
        self.by_room.remove(&(Reverse(*room), gpu));
        *room = change(*room);
        self.by_room.insert((Reverse(*room), gpu));
    }

    fn unbind(&mut self, function: FunctionIndex) -> Option<FunctionBinding> {
        let bound = self.functions.remove(&function)?;
        self.starting.remove(&(bound.ready, function));
        bound.expires.map(|at| self.expiring.remove(&(at, function)));
        self.set_room(bound.gpu, |room| room + bound.size);
        self.look = true;
        Some(bound)
    }

    /// Ends the cold starts and keep-alive times that are over.
    fn elapse(&mut self, now: Timestamp) {
        while let Some((_, function)) = self.starting.first().copied().filter(|&(at, _)| at <= now) {
            self.starting.pop_first();
            if let Some(bound) = self.functions.get_mut(&function) {
                self.own[bound.gpu.0 as usize].append(&mut bound.cold);
                self.ready.insert(bound.gpu);
            }
        }
        while let Some((_, function)) = self.expiring.first().copied().filter(|&(at, _)| at <= now) {
            self.unbind(function);
        }
    }

    /// Binds the waiting functions for which a GPU has memory, the function with the oldest request
    /// first. Returns a refusal for a request that no GPU will ever have memory for. A function
    /// without memory does not delay the others.
    fn bind(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        if !std::mem::take(&mut self.look) {
            return None;
        }
        for (oldest, function) in self.by_age.clone() {
            let Some(request) = self.unbound.get(&function).and_then(|its| its.get(&oldest)).copied() else {
                continue;
            };
            let memory = view.models.get(request.model).memory;
            match self.find_room(view, &request, memory) {
                MemorySearch::On(gpu) => {
                    let size = self.size_on(&self.gpus[gpu.0 as usize], memory);
                    let ready = view.now + self.config.cold_start;
                    let bound = FunctionBinding {
                        gpu,
                        size,
                        ready,
                        cold: BTreeMap::new(),
                        waiting: 0,
                        expires: None,
                    };
                    self.functions.insert(function, bound);
                    self.starting.insert((ready, function));
                    self.set_room(gpu, |room| room - size);
                    self.take_unbound(function).into_values().for_each(|its| self.push(its, QueueEntry::New));
                }
                MemorySearch::Later => {}
                MemorySearch::Never => {
                    self.drop_unbound(&request);
                    // Other requests may have to be refused too.
                    self.look = true;
                    return Some(DispatchDecision::Refuse { request, reason: Reason::NoGpuMemory });
                }
            }
        }
        None
    }

    /// Returns the size of the blocks that a function with a model of `memory` needs on a GPU: the
    /// model and the runtime have blocks of their own.
    fn size_on(&self, gpu: &GpuConfig, memory: Bytes) -> Bytes {
        gpu.block.round_up(memory) + gpu.block.round_up(self.config.runtime)
    }

    fn find_room(&self, view: &DispatchView<'_>, request: &WaitingRequest, memory: Bytes) -> MemorySearch {
        let size = |gpu: GpuIndex| self.size_on(&self.gpus[gpu.0 as usize], memory);
        let roomy = self.by_room.iter().filter(|&&(Reverse(room), gpu)| room >= size(gpu));
        let mut fits = roomy.map(|&(_, gpu)| gpu).filter(|&gpu| view.fleet.get(gpu).rank >= request.rank);
        let up = |gpu: &GpuIndex| view.fleet.get(*gpu).executor.is_some();
        // Permanent bindings free no memory; a GPU that is down may return with some.
        let full = self.config.binding == BindingLifetime::ForGood && fits.clone().next().is_none();
        let too_large = self.gpus.iter().all(|gpu| self.size_on(gpu, memory) > gpu.usable());
        match fits.find(up) {
            Some(gpu) => MemorySearch::On(gpu),
            None if full || too_large => MemorySearch::Never,
            None => MemorySearch::Later,
        }
    }

    /// Removes a request of a function that is not bound.
    fn drop_unbound(&mut self, request: &WaitingRequest) {
        let mut its = self.take_unbound(request.function);
        its.remove(&request.key);
        if let Some((&oldest, _)) = its.first_key_value() {
            self.by_age.insert((oldest, request.function));
            self.unbound.insert(request.function, its);
        }
    }
}

/// Result of the search for memory for a function.
enum MemorySearch {
    On(GpuIndex),
    Later,
    Never,
}

impl DispatchPolicy for EarlyBinding {
    fn push(&mut self, request: WaitingRequest, _entry: QueueEntry) {
        let Some(bound) = self.functions.get_mut(&request.function) else {
            return self.wait_unbound(request);
        };
        bound.waiting += 1;
        if let Some(at) = bound.expires.take() {
            self.expiring.remove(&(at, request.function));
        }
        if self.starting.contains(&(bound.ready, request.function)) {
            bound.cold.insert(request.key, request);
        } else {
            self.own[bound.gpu.0 as usize].insert(request.key, request);
            self.ready.insert(bound.gpu);
        }
    }

    fn remove(&mut self, request: &WaitingRequest) {
        self.drop_unbound(request);
        let Some(bound) = self.functions.get_mut(&request.function) else { return };
        let here =
            self.own[bound.gpu.0 as usize].remove(&request.key).or_else(|| bound.cold.remove(&request.key));
        bound.waiting -= usize::from(here.is_some());
        if let BindingLifetime::KeepAlive(keep_alive) = self.config.binding
            && bound.waiting == 0
            && bound.expires.is_none()
        {
            let at = self.now.max(bound.ready) + keep_alive;
            bound.expires = Some(at);
            self.expiring.insert((at, request.function));
        }
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        if let Some(refused) = self.bind(view) {
            return Some(refused);
        }
        // Functions without a cold start are ready at once.
        self.elapse(view.now);
        while let Some(gpu) = self.ready.pop_first() {
            let Some(seat) = view.fleet.idle_seat(gpu, SizeRank(0)) else { continue };
            let Some((_, request)) = self.own[gpu.0 as usize].pop_first() else { continue };
            // The GPU may have another idle seat.
            self.ready.insert(gpu);
            if let (Some(bound), BindingLifetime::KeepAlive(keep_alive)) =
                (self.functions.get_mut(&request.function), self.config.binding)
            {
                bound.waiting -= 1;
                if bound.waiting == 0 {
                    let at = view.now + keep_alive;
                    bound.expires = Some(at);
                    self.expiring.insert((at, request.function));
                }
            }
            return Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host });
        }
        None
    }

    /// Also called after the GPU comes up.
    fn on_seat_freed(&mut self, _seat: SeatIndex, gpu: GpuIndex) {
        self.ready.insert(gpu);
        self.look = true;
    }

    fn on_gpu_lost(&mut self, gpu: GpuIndex) -> Vec<WaitingRequest> {
        let on = self.functions.iter().filter(|(_, bound)| bound.gpu == gpu);
        for function in on.map(|(&function, _)| function).collect::<Vec<_>>() {
            if let Some(bound) = self.unbind(function) {
                bound.cold.into_values().for_each(|request| self.wait_unbound(request));
            }
        }
        let waiting = std::mem::take(&mut self.own[gpu.0 as usize]);
        waiting.into_values().for_each(|request| self.wait_unbound(request));
        Vec::new()
    }

    /// The policy needs to know about removed functions ([`DispatchPolicy::forget`]).
    fn uses_scores(&self) -> bool {
        true
    }

    fn forget(&mut self, function: FunctionIndex) {
        // Requests that still wait bind the function again.
        if let Some(bound) = self.unbind(function) {
            bound.cold.into_values().for_each(|request| self.wait_unbound(request));
            let own = &mut self.own[bound.gpu.0 as usize];
            let (its, others) =
                std::mem::take(own).into_iter().partition(|(_, request)| request.function == function);
            *own = others;
            let its: BTreeMap<RequestKey, WaitingRequest> = its;
            its.into_values().for_each(|request| self.wait_unbound(request));
        }
    }

    /// Runs even if no request waits; otherwise [`Self::next_wake`] would return a past time for
    /// ever.
    fn tick(&mut self, now: Timestamp, _models: &ModelTable) {
        self.now = now;
        self.elapse(now);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let firsts = [self.starting.first(), self.expiring.first()];
        firsts.into_iter().flatten().map(|&(at, _)| at).min()
    }
}
