//! Our own policy: the least estimated finish, with requests first that can still meet their
//! deadline.
//!
//! **GPU.** For each request the policy compares estimated finish times ([`placing`]). The options
//! are an idle holder of the model, an idle GPU to which the model is copied, and a busy holder.
//! The source of a copy is a peer, or the host over a free or a shared link. Each estimate includes
//! the transfer of the request's inputs, which a wait can hide ([`locality`](super::locality)). A load
//! is charged more than its time: for the GPU time that other requests lose, and for the evicted
//! models.
//!
//! **Order** ([`flows`]). Functions are endangered, safe, free of any deadline, or hopeless, by
//! their required request counts (T18). A function that is one late request away from missing its
//! objective goes before a function that can afford one. A function that cannot be rescued goes
//! after both. Functions with batching share a class ([`batching_class`]). Within a class the least
//! slack goes first. A request that can no longer be in time goes behind all requests that can,
//! regardless of its function (docs/develop/mechanisms.md, T21). An idle GPU takes a hit
//! before the most urgent request if that request can wait, so locality costs no deadline.
//!
//! This order approximates the probability that an objective is still met. The late requests that a
//! function can afford stand for the function, and the time until a run has to begin stands for the
//! request. The policy estimates no distribution of waiting times: future requests are unknown, and
//! a wrong distribution would put certain losses before requests that can be saved.
//!
//! **Busy GPUs.** While no GPU is idle, a hit is assigned to a busy GPU that will begin the hit
//! sooner than a recall would take ([`RECALL_COST`]), as long as the most urgent request can wait.
//! If runs last a few microseconds, several runs then share a wake of the executor. If a busy GPU
//! will find no hit, its next model is loaded during the run, but only for a request without a
//! deadline: the request is bound early, and a more urgent request may come. A GPU that falls idle
//! recalls a request from a busy GPU if the idle GPU would begin the request sooner.
//!
//! **Overtaking** is bounded as in LALB (L14): a request at its [overtaking](super::overtaking)
//! limit goes next, late or not, so a demoted request does not starve. The limit of a request with
//! a deadline is larger than the limit of a request without a deadline; while an older request has
//! a deadline, the larger limit applies to both. While the oldest request has a deadline, only [one
//! departure in so many](UnifiedConfig::aged_every) goes by age. In a lasting overload more
//! requests are at their limit than the GPUs can serve, and serving these first would make all
//! others late too.

mod batching_class;
mod flows;
mod placing;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{GpuIndex, SloCounts, Timestamp};

use self::batching_class::BatchingClass;
use self::flows::{CLASSES, FlowCandidate, FlowUrgency, RequestFlows};
use super::config::UnifiedConfig;
use super::models::{ModelSlot, ModelTable};
use super::overtaking::{AgeQueues, OvertakingBound};
use super::policy::{CopyOrigin, DispatchDecision, DispatchPolicy, DispatchStats, DispatchView, QueueEntry};
use super::protocol::LatencyObjective;
use super::queue::WaitingRequest;
use super::seats::{ExpectedFinish, RECALL_COST};
use super::torpor::required::{RequiredRequestCount, ScoredRequests};
use millrace_core::ids::{FunctionIndex, SeatIndex};

/// Maximum shortfall of an endangered function, in late requests beyond its objective. Above this,
/// the function is hopeless.
const RESCUED_MAX: i128 = 1;
/// Maximum number of idle GPUs compared for a load, and of holders examined. More make no
/// difference that is worth the time.
const COMPARED_MAX: usize = 8;
/// Number of requests examined as candidates for a load on a busy GPU.
const LOOKED_AT_MAX: usize = 2;
/// Number of busy GPUs examined for such a load when a request arrives.
const AHEAD_LOOKS_MAX: usize = 2;

#[derive(Debug)]
struct Function {
    objective: Option<LatencyObjective>,
    tally: ScoredRequests,
    /// Class by the function's own counts.
    own: FlowUrgency,
}

impl Function {
    /// Returns whether the function shares a class with all other functions with batching.
    fn shares(&self) -> bool {
        self.own != FlowUrgency::Free && self.objective.is_some_and(LatencyObjective::batchable)
    }
}

#[derive(Debug)]
pub(super) struct Unified {
    config: UnifiedConfig,
    functions: BTreeMap<FunctionIndex, Function>,
    together: BatchingClass,
    ages: AgeQueues,
    flows: RequestFlows,
    /// Busy seats that may accept a next request.
    ready: BTreeSet<SeatIndex>,
    /// Model of the most recent request, until busy seats were examined for it.
    fresh: Option<ModelSlot>,
}

impl Unified {
    pub(super) fn new(config: UnifiedConfig, ranks: usize) -> Self {
        Self {
            config,
            functions: BTreeMap::new(),
            together: BatchingClass::default(),
            ages: AgeQueues::new(ranks),
            flows: RequestFlows::new(ranks),
            ready: BTreeSet::new(),
            fresh: None,
        }
    }

    /// Returns the class of a function's requests.
    fn class(&self, index: FunctionIndex) -> FlowUrgency {
        match self.functions.get(&index) {
            None => FlowUrgency::Free,
            Some(function) if function.shares() => self.together.class(),
            Some(function) => function.own,
        }
    }

    /// Updates the class of a function after a change of its counts or objective.
    fn classify(&mut self, index: FunctionIndex) {
        if let Some(function) = self.functions.get_mut(&index) {
            function.own = class(function.objective, &function.tally);
        }
        if !self.functions.get(&index).is_some_and(Function::shares) {
            self.together.drop(index);
        }
        let class = self.class(index);
        self.flows.reclass(index, class);
    }

    /// Notes that a function got a request, or a score if `scored`.
    fn hear(&mut self, index: FunctionIndex, scored: bool) {
        if let Some(function) = self.functions.get(&index).filter(|function| function.shares()) {
            self.together.record_event(index, function.own, scored);
        }
    }

    /// Updates the class of all functions with batching, if that class changed.
    fn update_shared_class(&mut self) {
        if self.together.look_again() {
            let class = self.together.class();
            let shares = |index| self.functions.get(&index).is_some_and(Function::shares);
            self.flows.reclass_all(shares, class);
        }
    }

    /// Removes a request that goes to a seat.
    fn send(&mut self, view: &DispatchView<'_>, request: &WaitingRequest, seat: SeatIndex) {
        self.ages.send(request.rank, request.key, view.fleet.under(seat).rank);
        self.flows.remove(request);
        self.ready.insert(seat);
    }

    /// Returns the most urgent request for a model that a GPU holds.
    fn hit(&self, view: &DispatchView<'_>, gpu: GpuIndex) -> Option<FlowCandidate> {
        self.flows.first_of(view.fleet.get(gpu).resident(), view.now)
    }

    /// Returns the most urgent request that fits a GPU. That is the first safe request if the first
    /// endangered request can wait for it.
    fn most_pressing(&self, view: &DispatchView<'_>, gpu: GpuIndex) -> Option<FlowCandidate> {
        let rank = view.fleet.get(gpu).rank;
        let first_of = |class| self.flows.first(rank, class, view.now);
        let Some(first) = CLASSES.into_iter().find_map(first_of) else {
            return self.flows.oldest_late(rank);
        };
        let safe = (first.class == FlowUrgency::Endangered).then(|| first_of(FlowUrgency::Safe)).flatten();
        let before = safe.filter(|safe| self.can_wait(view, gpu, &first, self.takes(view, gpu, safe)));
        Some(before.unwrap_or(first))
    }

    /// Returns the time for which a request occupies a GPU.
    fn takes(&self, view: &DispatchView<'_>, gpu: GpuIndex, candidate: &FlowCandidate) -> Duration {
        let model = candidate.request.model;
        let run = view.models.run_time(model, view.fleet.get(gpu).kind).unwrap_or_default();
        view.bringing(gpu, &candidate.request).saturating_add(run)
    }

    /// Returns whether a request is still in time here after another request occupies the GPU for
    /// `other`. Also true if the request is late in any case, so that haste is useless.
    fn can_wait(
        &self,
        view: &DispatchView<'_>,
        gpu: GpuIndex,
        candidate: &FlowCandidate,
        other: Duration,
    ) -> bool {
        if candidate.late || candidate.class >= FlowUrgency::Free {
            return true;
        }
        let begins = view.now + view.bringing(gpu, &candidate.request);
        begins + other <= candidate.latest || begins > candidate.latest
    }

    /// Returns the decision for an idle seat: a request for this seat, or a request that has to go
    /// elsewhere first.
    fn for_idle(&mut self, view: &DispatchView<'_>, seat: SeatIndex) -> Option<DispatchDecision> {
        let gpu = view.fleet.gpu_of(seat);
        let rank = view.fleet.get(gpu).rank;
        if let Some((key, from)) = self.ages.at_limit(rank) {
            let request = self.ages.get(from, key)?;
            return self.place(view, seat, &request);
        }
        let hit = self.hit(view, gpu);
        let first = self.most_pressing(view, gpu);
        match (hit, first) {
            (Some(hit), Some(first))
                if hit.late <= first.late
                    && self.can_wait(view, gpu, &first, self.takes(view, gpu, &hit)) =>
            {
                self.place_hit(view, seat, &hit.request)
            }
            (Some(hit), None) => self.place_hit(view, seat, &hit.request),
            (_, Some(first)) => self.place(view, seat, &first.request),
            (None, None) => None,
        }
    }

    /// Returns whether no other busy holder would begin a request sooner because its inputs are
    /// there.
    fn nearest(&self, view: &DispatchView<'_>, seat: SeatIndex, request: &WaitingRequest) -> bool {
        view.inputs(request).is_empty()
            || self.busy_holder(view, request).is_none_or(|(_, first)| first == seat)
    }

    /// Returns the request to assign behind the running request of a busy seat, if any.
    fn for_busy(&mut self, view: &DispatchView<'_>, seat: SeatIndex) -> Option<DispatchDecision> {
        let it = view.fleet.glance(seat);
        if !it.takes(it.rank()) {
            return None;
        }
        let nobody_ahead = it.nobody_ahead();
        let left = view.fleet.backlog(view.models, view.now, seat)?;
        let gpu = view.fleet.gpu_of(seat);
        let rank = view.fleet.get(gpu).rank;
        if let Some((key, from)) = self.ages.at_limit(rank) {
            let request = self.ages.get(from, key)?;
            // No other request may be assigned before the request at its limit.
            return (nobody_ahead && self.worth_bringing(view, gpu, left, &request))
                .then(|| self.assign(view, &request, seat, CopyOrigin::Host));
        }
        let soon = left <= RECALL_COST;
        let may_bring = nobody_ahead && self.flows.has_free(rank);
        if !soon && !may_bring {
            return None;
        }
        if let Some(hit) = self.hit(view, gpu) {
            // A hit with a later turn waits for the end of the running request, and no other model
            // is loaded.
            let goes = soon
                && !hit.request.attempts.suspect()
                && self.nearest(view, seat, &hit.request)
                && self.delays_nobody(view, gpu, left, &hit);
            return goes.then(|| self.assign(view, &hit.request, seat, CopyOrigin::Host));
        }
        if !nobody_ahead {
            return None;
        }
        let free = self.flows.firsts(rank, FlowUrgency::Free, view.now, LOOKED_AT_MAX);
        let suits = |candidate: &&FlowCandidate| self.worth_bringing(view, gpu, left, &candidate.request);
        let request = free.iter().find(suits)?.request;
        Some(self.assign(view, &request, seat, CopyOrigin::Host))
    }

    /// Returns whether the most urgent request for a busy GPU can wait for a hit that is assigned
    /// now.
    fn delays_nobody(
        &self,
        view: &DispatchView<'_>,
        gpu: GpuIndex,
        left: Duration,
        hit: &FlowCandidate,
    ) -> bool {
        let Some(first) = self.most_pressing(view, gpu) else { return true };
        if first.request.key == hit.request.key {
            return true;
        }
        hit.late <= first.late && self.can_wait(view, gpu, &first, left + self.takes(view, gpu, hit))
    }
}

/// Returns the seats of a model's holders that will begin a next request sooner than a recall would
/// take.
fn soon_free_holders(view: &DispatchView<'_>, model: ModelSlot) -> impl Iterator<Item = SeatIndex> {
    let soon = ExpectedFinish::At(view.now + RECALL_COST);
    let holders = view.models.get(model).holders.iter().take(COMPARED_MAX);
    let seats = holders.flat_map(|gpu| view.fleet.get(gpu).seats());
    seats.filter(move |&seat| view.fleet.glance(seat).soonest(view.models, view.now) <= soon)
}

fn class(objective: Option<LatencyObjective>, tally: &ScoredRequests) -> FlowUrgency {
    let Some(objective) = objective.filter(|objective| objective.deadline().is_some()) else {
        return FlowUrgency::Free;
    };
    let required = RequiredRequestCount::of(tally.counts(), objective);
    let late = RequiredRequestCount::one_late(objective);
    match () {
        () if required.0 + late.0 <= 0 => FlowUrgency::Safe,
        () if required.0 <= late.0 * RESCUED_MAX => FlowUrgency::Endangered,
        () => FlowUrgency::Hopeless,
    }
}

impl DispatchPolicy for Unified {
    fn push(&mut self, request: WaitingRequest, entry: QueueEntry) {
        let class = self.class(request.function);
        let function = self.functions.get(&request.function);
        let deadline = function.and_then(|function| function.objective?.deadline());
        let bound = if deadline.is_some() {
            OvertakingBound { times: self.config.overtakes_max, every: self.config.aged_every }
        } else {
            OvertakingBound::strict(self.config.free_overtakes_max)
        };
        self.ages.insert(request, entry, bound);
        self.flows.insert(request, class, deadline);
        self.hear(request.function, false);
        self.fresh = Some(request.model);
    }

    fn remove(&mut self, request: &WaitingRequest) {
        self.ages.take(request.rank, request.key);
        self.flows.remove(request);
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        // Not at each score: a restarted worker reports all scores before the first request waits.
        if self.ages.smallest().is_some() {
            self.update_shared_class();
        }
        let functions = &self.functions;
        let deadline = |function| functions.get(&function).and_then(|it: &Function| it.objective?.deadline());
        self.flows.settle(view.now, view.models, deadline);
        let smallest = self.ages.smallest()?;
        if let Some(seat) = view.fleet.first_idle(smallest) {
            return self.for_idle(view, seat);
        }
        if let Some(model) = self.fresh.take() {
            self.ready.extend(view.fleet.free_ahead().take(AHEAD_LOOKS_MAX));
            self.ready.extend(soon_free_holders(view, model));
        }
        while let Some(seat) = self.ready.pop_first() {
            if let Some(decision) = self.for_busy(view, seat) {
                return Some(decision);
            }
        }
        None
    }

    fn recalls(&self) -> bool {
        true
    }

    /// Differs from the default: a slightly overdue run is no reason to load a model elsewhere.
    fn expected_turn(&self, view: &DispatchView<'_>, seat: SeatIndex, ahead: usize) -> ExpectedFinish {
        let backlog = view.fleet.backlog_of(view.models, view.now, seat, ahead);
        backlog.map_or(ExpectedFinish::Unknown, |backlog| ExpectedFinish::At(view.now + backlog))
    }

    fn overdue_at(&self, view: &DispatchView<'_>, seat: SeatIndex) -> Option<Timestamp> {
        view.fleet.overdue_at(view.models, seat)
    }

    fn bringing(&self, view: &DispatchView<'_>, gpu: GpuIndex, request: &WaitingRequest) -> Duration {
        self.charge(view, gpu, request).cost
    }

    fn on_seat_freed(&mut self, seat: SeatIndex, _gpu: GpuIndex) {
        self.ready.insert(seat);
    }

    fn uses_scores(&self) -> bool {
        true
    }

    fn objective(&mut self, function: FunctionIndex, objective: Option<LatencyObjective>) {
        let counts = self.config.counts;
        let it = self.functions.entry(function).or_insert_with(|| Function {
            objective: None,
            tally: ScoredRequests::new(counts),
            own: FlowUrgency::Free,
        });
        it.objective = objective;
        self.classify(function);
    }

    fn score(&mut self, _models: &ModelTable, function: FunctionIndex, counts: SloCounts) {
        if let Some(it) = self.functions.get_mut(&function) {
            it.tally.update(counts);
            self.classify(function);
            self.hear(function, true);
        }
    }

    fn forget(&mut self, function: FunctionIndex) {
        self.functions.remove(&function);
        self.classify(function);
    }

    fn add_stats(&self, stats: &mut DispatchStats) {
        self.ages.count(stats);
    }

    #[cfg(test)]
    fn check(&self, view: &DispatchView<'_>, models: &[super::models::ModelSlot]) {
        self.ages.check();
        let shares = self.functions.iter().filter(|(_, it)| it.shares());
        self.together.check(&shares.map(|(&index, it)| (index, it.own)).collect());
        self.flows.check(view.now, models);
        for (request, model) in crate::dispatch::tests::requests_of(view, models) {
            let takes = |seat: &SeatIndex| {
                let it = view.fleet.under(*seat);
                view.fleet.accepts_queued(*seat)
                    && it.rank >= request.rank
                    && view.fleet.seat(*seat).ahead.len() < view.fleet.seat(*seat).ahead_max
                    && self.ages.may_go(request.key, it.rank)
            };
            let holders = view.models.get(model).holders.iter();
            let few = holders.flat_map(|gpu| view.fleet.get(gpu).seats()).filter(takes).take(COMPARED_MAX);
            let moved = |seat| view.fleet.move_time(view.inputs(&request), view.fleet.gpu_of(seat));
            let wait = |seat| Some((view.fleet.backlog(view.models, view.now, seat)?.max(moved(seat)), seat));
            assert_eq!(self.busy_holder(view, &request), few.filter_map(wait).min(), "{request:?}");
            self.check_choice(view, &request);
        }
    }
}
