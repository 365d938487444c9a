//! Locality and load balance, with out-of-order dispatch (L03, L09 to L14, L16): algorithms 1 and 2
//! of the LALB paper, in the reading of docs/develop/mechanisms.md.
//!
//! An idle seat of a GPU takes, in this order:
//!
//! 1. the first request of its own queue (L10);
//! 2. the oldest request for a model that the GPU holds. This hit overtakes older requests, unless
//!    an older request is at its overtaking limit (L11, L14);
//! 3. the request at its limit, else the oldest request of all. This request goes to another idle
//!    GPU that holds its model; else to the own queue of the busy holder that finishes first, if
//!    that is before this GPU could have loaded the model (L12); else to this GPU (L13).
//!
//! The requests in a GPU's own queue are assigned behind its running request one at a time, and are
//! never recalled. The GPU holds the model, so no load starts earlier than in the paper. The GPU
//! waits for no message. The model stays pinned on the GPU until its last request there has left.
//! Among several idle holders, a request goes to the GPU that its inputs reach soonest
//! ([`inputs`](super::inputs)). A request that may not be [overtaken](super::overtaking) any more
//! goes next.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::GpuIndex;

use super::load_summary;
use super::models::ModelSlot;
use super::overtaking::{AgeQueues, OvertakingBound};
use super::policy::{CopyOrigin, DispatchDecision, DispatchPolicy, DispatchStats, DispatchView, QueueEntry};
use super::queue::WaitingRequest;
use super::seats::ExpectedFinish;
use super::size_rank::SizeRank;
use millrace_core::ids::{RequestKey, SeatIndex};

/// Own queue of a GPU: the requests that wait for this GPU alone. Each seat of the GPU serves it.
#[derive(Debug, Default)]
struct Own {
    queue: BTreeMap<RequestKey, (WaitingRequest, Duration)>,
    /// Sum of the expected run times.
    time: Duration,
}

impl Own {
    fn take(&mut self, key: RequestKey) -> Option<WaitingRequest> {
        let (request, time) = self.queue.remove(&key)?;
        self.time -= time;
        Some(request)
    }
}

#[derive(Debug)]
pub(super) struct Lalb {
    limit: u32,
    ages: AgeQueues,
    /// Keys of the requests in [`Self::ages`], by model slot.
    by_model: Vec<BTreeSet<RequestKey>>,
    /// Oldest key of each model, stored contiguously: an idle GPU reads an entry for each resident
    /// model.
    oldest: Vec<Option<RequestKey>>,
    own: Vec<Own>,
    /// GPU for which a request waits in its own queue.
    reserved: BTreeMap<RequestKey, GpuIndex>,
    /// GPUs that may accept the next request of their own queue.
    ready: BTreeSet<GpuIndex>,
    reserves: u64,
}

impl Lalb {
    pub(super) fn new(ranks: usize, gpus: usize, limit: u32) -> Self {
        Self {
            limit,
            ages: AgeQueues::new(ranks),
            by_model: Vec::new(),
            oldest: Vec::new(),
            own: (0..gpus).map(|_| Own::default()).collect(),
            reserved: BTreeMap::new(),
            ready: BTreeSet::new(),
            reserves: 0,
        }
    }

    /// Adds or removes a request that waits for a model.
    fn waits_for(&mut self, model: ModelSlot, key: RequestKey, waits: bool) {
        let place = model.0 as usize;
        if self.by_model.len() <= place {
            self.by_model.resize_with(place + 1, BTreeSet::new);
            self.oldest.resize(place + 1, None);
        }
        let waiting = &mut self.by_model[place];
        if waits {
            waiting.insert(key)
        } else {
            waiting.remove(&key)
        };
        let oldest = &mut self.oldest[place];
        if oldest.is_none_or(|oldest| key <= oldest) {
            *oldest = waiting.first().copied();
        }
    }

    /// Removes a request that goes to a GPU of this rank.
    fn send(&mut self, from: SizeRank, key: RequestKey, to: SizeRank) -> Option<WaitingRequest> {
        let request = self.ages.send(from, key, to)?;
        self.waits_for(request.model, key, false);
        Some(request)
    }

    /// Returns the next request of an own queue, if its GPU can accept a request.
    fn next_reserved(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        while let Some(gpu) = self.ready.pop_first() {
            let own = &mut self.own[gpu.0 as usize];
            let Some(&key) = own.queue.keys().next() else { continue };
            let Some(seat) = view.fleet.next_seat(view.models, view.now, gpu) else { continue };
            let Some(request) = own.take(key) else { continue };
            self.reserved.remove(&key);
            self.ready.insert(gpu);
            return Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host });
        }
        None
    }

    /// Returns the oldest request for a model that a GPU holds.
    fn hit(&self, view: &DispatchView<'_>, gpu: GpuIndex) -> Option<(RequestKey, SizeRank)> {
        let models = view.fleet.get(gpu).resident();
        let oldest = |model: ModelSlot| Some(((*self.oldest.get(model.0 as usize)?)?, model));
        let (key, model) = models.filter_map(oldest).min()?;
        Some((key, view.models.get(model).rank?))
    }

    /// Returns the decision for an idle seat: a request for this seat, or a request that has to go
    /// elsewhere first (algorithm 1).
    fn for_seat(&mut self, view: &DispatchView<'_>, seat: SeatIndex) -> Option<DispatchDecision> {
        let gpu = view.fleet.gpu_of(seat);
        let rank = view.fleet.get(gpu).rank;
        let at_limit = self.ages.at_limit(rank);
        let hit = match at_limit {
            // No hit can be older than the oldest request, and no younger hit may overtake the
            // oldest request.
            Some((key, from)) if self.ages.oldest(rank) == at_limit => {
                let model = self.ages.get(from, key)?.model;
                at_limit.filter(|_| view.fleet.get(gpu).holds(model))
            }
            _ => self.hit(view, gpu),
        };
        if let Some((key, from)) = hit.filter(|hit| at_limit.is_none_or(|at_limit| hit.0 <= at_limit.0)) {
            let request = self.ages.get(from, key)?;
            let seat = self.nearest_holder(view, &request, seat);
            let request = self.send(from, key, view.fleet.under(seat).rank)?;
            return Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host });
        }
        let (key, from) = at_limit.or_else(|| self.ages.oldest(rank))?;
        if at_limit.is_none() {
            self.ages.record_fruitless_search();
        }
        self.balance(view, seat, key, from)
    }

    /// Returns a seat of the idle holder of the model that a request's inputs reach soonest, and of
    /// the GPU of `idle` among equals: the request is a hit on each of them.
    fn nearest_holder(
        &self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
        idle: SeatIndex,
    ) -> SeatIndex {
        let inputs = view.inputs(request);
        if inputs.is_empty() {
            return idle;
        }
        let here = view.fleet.gpu_of(idle);
        let key = |gpu| (self.held_up(view, request, gpu), view.fleet.move_time(inputs, gpu), gpu != here);
        let holders = &view.models.get(request.model).holders;
        view.fleet.idle_holder(holders, request.rank, key).unwrap_or(idle)
    }

    /// Returns whether an older request that also fits the GPU is at its limit.
    fn held_up(&self, view: &DispatchView<'_>, request: &WaitingRequest, gpu: GpuIndex) -> bool {
        !self.ages.may_go(request.key, view.fleet.get(gpu).rank)
    }

    /// Decides where a request goes that is no hit on the GPU of the idle seat (algorithm 2).
    fn balance(
        &mut self,
        view: &DispatchView<'_>,
        idle: SeatIndex,
        key: RequestKey,
        from: SizeRank,
    ) -> Option<DispatchDecision> {
        let request = self.ages.get(from, key)?;
        let holders = &view.models.get(request.model).holders;
        // GPUs for which an older request is at its limit sort last, and the filter drops them.
        let held_up = |gpu: GpuIndex| self.held_up(view, &request, gpu);
        let near = |gpu| (held_up(gpu), view.fleet.move_time(view.inputs(&request), gpu));
        let other_idle = view.fleet.idle_holder(holders, from, near);
        let other_idle = other_idle.filter(|&seat| !held_up(view.fleet.gpu_of(seat)));
        let busy = || self.busy_holder(view, &request, view.fleet.gpu_of(idle));
        let seat = match other_idle {
            Some(seat) => seat,
            None => match busy() {
                Some(seat) => return self.reserve(view, &request, seat),
                None => idle,
            },
        };
        let request = self.send(from, key, view.fleet.under(seat).rank)?;
        Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host })
    }

    /// Returns the busy seat of a holder that would finish a request first, if sooner than the idle
    /// GPU would.
    fn busy_holder(
        &self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
        idle: GpuIndex,
    ) -> Option<SeatIndex> {
        if request.attempts.suspect() {
            return None;
        }
        let run = |kind| view.models.run_time(request.model, kind);
        let here = view.fleet.get(idle);
        let load = view.fleet.swap_time(view.models, idle, request.model);
        let own = |gpu: GpuIndex| self.own[gpu.0 as usize].time;
        let finish = |seat: SeatIndex| {
            let gpu = view.fleet.gpu_of(seat);
            let it = view.fleet.get(gpu);
            if !view.fleet.accepts_queued(seat) || !self.ages.may_go(request.key, it.rank) {
                return None;
            }
            let wait = view.fleet.backlog(view.models, view.now, seat)? + own(gpu);
            // On GPUs of the same kind the run takes equally long on both sides.
            let (there, miss) = match it.kind == here.kind {
                true => (wait, load),
                false => (wait + run(it.kind)?, load + run(here.kind)?),
            };
            (there < miss).then_some(ExpectedFinish::At(view.now + there))
        };
        let bound = |seat: SeatIndex| {
            let soonest = view.fleet.glance(seat).soonest(view.models, view.now);
            soonest.and(own(view.fleet.gpu_of(seat)))
        };
        let latest = ExpectedFinish::At(view.now + load + run(here.kind).unwrap_or_default());
        let holders = view.models.get(request.model).holders.iter();
        let seats = holders.flat_map(|gpu| view.fleet.get(gpu).seats()).map(|seat| (bound(seat), seat));
        let in_time = seats.filter(|&(bound, _)| bound < latest);
        load_summary::first_of_close(in_time, finish).map(|(_, seat)| seat)
    }

    /// Binds a request to the GPU of a busy seat, and assigns the request to the seat at once if no
    /// other request waits there.
    fn reserve(
        &mut self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
        seat: SeatIndex,
    ) -> Option<DispatchDecision> {
        let gpu = view.fleet.gpu_of(seat);
        let it = view.fleet.get(gpu);
        let request = self.send(request.rank, request.key, it.rank)?;
        self.reserves += 1;
        if self.own[gpu.0 as usize].queue.is_empty() && view.fleet.seat(seat).ahead.is_empty() {
            return Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host });
        }
        let time = view.models.run_time(request.model, it.kind).unwrap_or_default();
        let own = &mut self.own[gpu.0 as usize];
        own.queue.insert(request.key, (request, time));
        own.time += time;
        self.reserved.insert(request.key, gpu);
        self.ready.insert(gpu);
        Some(DispatchDecision::Reserve { request, gpu })
    }
}

impl DispatchPolicy for Lalb {
    fn push(&mut self, request: WaitingRequest, entry: QueueEntry) {
        self.ages.insert(request, entry, OvertakingBound::strict(self.limit));
        self.waits_for(request.model, request.key, true);
    }

    fn remove(&mut self, request: &WaitingRequest) {
        match self.reserved.remove(&request.key) {
            Some(gpu) => drop(self.own[gpu.0 as usize].take(request.key)),
            None => {
                self.ages.take(request.rank, request.key);
                self.waits_for(request.model, request.key, false);
            }
        }
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        if let Some(decision) = self.next_reserved(view) {
            return Some(decision);
        }
        // The first idle seat on a GPU that fits at least one waiting request (L09).
        let seat = view.fleet.first_idle(self.ages.smallest()?)?;
        self.for_seat(view, seat)
    }

    fn on_seat_freed(&mut self, _seat: SeatIndex, gpu: GpuIndex) {
        self.ready.insert(gpu);
    }

    fn on_gpu_lost(&mut self, gpu: GpuIndex) -> Vec<WaitingRequest> {
        let own = std::mem::take(&mut self.own[gpu.0 as usize]);
        let requests: Vec<_> = own.queue.into_values().map(|(request, _)| request).collect();
        for &request in &requests {
            self.reserved.remove(&request.key);
            self.push(request, QueueEntry::Back);
        }
        requests
    }

    fn add_stats(&self, stats: &mut DispatchStats) {
        self.ages.count(stats);
        stats.reserved = self.reserves;
    }

    #[cfg(test)]
    fn check(&self, view: &DispatchView<'_>, models: &[ModelSlot]) {
        self.ages.check();
        let oldest: Vec<_> = self.by_model.iter().map(|waiting| waiting.first().copied()).collect();
        assert_eq!(self.oldest, oldest);
        for gpu in view.fleet.up() {
            let oldest = |model: ModelSlot| Some((*self.by_model.get(model.0 as usize)?.first()?, model));
            let hit = view.fleet.get(gpu).resident().filter_map(oldest).min().map(|(key, _)| key);
            assert_eq!(self.hit(view, gpu).map(|(key, _)| key), hit);
            for (request, model) in super::tests::requests_of(view, models) {
                let all = view.models.get(model).holders.iter().flat_map(|gpu| view.fleet.get(gpu).seats());
                let own = |gpu: GpuIndex| self.own[gpu.0 as usize].time;
                let may_go = |gpu: GpuIndex| self.ages.may_go(request.key, view.fleet.get(gpu).rank);
                let through = |seat: SeatIndex| {
                    let holder = view.fleet.gpu_of(seat);
                    let it = view.fleet.get(holder);
                    let wait = view.fleet.backlog(view.models, view.now, seat)? + own(holder);
                    let load = view.fleet.swap_time(view.models, gpu, model);
                    let run = |kind| view.models.run_time(model, kind);
                    let here = view.fleet.get(gpu).kind;
                    let sooner = match it.kind == here {
                        true => wait < load,
                        false => wait + run(it.kind)? < load + run(here)?,
                    };
                    (sooner && view.fleet.accepts_queued(seat) && may_go(holder)).then_some(())?;
                    Some((if it.kind == here { wait } else { wait + run(it.kind)? }, seat))
                };
                let by_scan = all.filter_map(through).min().map(|(_, seat)| seat);
                assert_eq!(self.busy_holder(view, &request, gpu), by_scan, "{request:?} for {gpu}");
                let moved = |holder| view.fleet.move_time(view.inputs(&request), holder);
                let idle = view.models.get(model).holders.iter();
                let idle = idle.filter_map(|holder| view.fleet.idle_seat(holder, request.rank));
                let key = |seat: &SeatIndex| {
                    let holder = view.fleet.gpu_of(*seat);
                    (self.held_up(view, &request, holder), moved(holder), holder != gpu, *seat)
                };
                let nearest = idle.min_by_key(key).filter(|_| !view.inputs(&request).is_empty());
                let seat = view.fleet.seats_of(gpu).next().map(|(seat, _)| seat).expect("a GPU has a seat");
                let chosen = self.nearest_holder(view, &request, seat);
                assert_eq!(chosen, nearest.unwrap_or(seat), "{request:?} for {gpu}");
            }
        }
    }
}
