//! Choice of the GPU with the least estimated finish.

use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex};

use super::{COMPARED_MAX, Unified};
use crate::dispatch::cost::SwapSource;
use crate::dispatch::models::ModelSlot;
use crate::dispatch::policy::{CopyOrigin, DispatchDecision, DispatchView};
use crate::dispatch::queue::WaitingRequest;
use millrace_core::ids::SeatIndex;

/// Maximum wait for a busy holder instead of a load on an idle GPU, in percent of the load: a load
/// also takes GPU time from other requests. The charge for evictions is added. Our own value, from
/// the papers' workloads: a smaller value loads more models than needed under load, and a larger
/// value leaves GPUs idle.
const PATIENCE_PERCENT: u32 = 105;
/// Charge for a load that evicts the last copy of another model, in percent: that model will be
/// loaded again and will evict others in turn.
const EVICTING_PERCENT: u32 = 180;
/// Age at which half of an evicted model's own load is charged, in multiples of that load. All of
/// the load is charged for a model that was requested just now, a third at twice this age, and so
/// on.
const COLD_AFTER: u128 = 24;

/// Cost of bringing a model and inputs to an idle GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LoadCharge {
    /// Time, plus the charges for the effects on other requests.
    pub(super) cost: Duration,
    /// Time alone.
    pub(super) swap: Duration,
}

impl Unified {
    /// Assigns a request to a seat.
    pub(super) fn assign(
        &mut self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
        seat: SeatIndex,
        over: CopyOrigin,
    ) -> DispatchDecision {
        self.send(view, request, seat);
        DispatchDecision::Assign { request: *request, seat, over }
    }

    /// Assigns the next request for an idle seat to that seat, to a seat of another idle GPU, or to a
    /// busy holder.
    pub(super) fn place(
        &mut self,
        view: &DispatchView<'_>,
        idle: SeatIndex,
        request: &WaitingRequest,
    ) -> Option<DispatchDecision> {
        let (seat, over) = self.choose(view, idle, request)?;
        Some(self.assign(view, request, seat, over))
    }

    /// Assigns a request to an idle holder of its model, or to the GPU near its inputs.
    pub(super) fn place_hit(
        &mut self,
        view: &DispatchView<'_>,
        idle: SeatIndex,
        request: &WaitingRequest,
    ) -> Option<DispatchDecision> {
        if view.inputs(request).is_empty() {
            return Some(self.assign(view, request, idle, CopyOrigin::Host));
        }
        self.place(view, idle, request)
    }

    fn choose(
        &self,
        view: &DispatchView<'_>,
        idle: SeatIndex,
        request: &WaitingRequest,
    ) -> Option<(SeatIndex, CopyOrigin)> {
        let may_go = |gpu: GpuIndex| self.ages.may_go(request.key, view.fleet.get(gpu).rank);
        let idle_seat = |gpu: GpuIndex| view.fleet.idle_seat(gpu, request.rank).filter(|_| may_go(gpu));
        let inputs = view.inputs(request);
        let moved = |gpu: GpuIndex| view.fleet.move_time(inputs, gpu);
        let holders = || view.models.get(request.model).holders.iter();
        // GPUs for which an older request is at its limit sort last, and the filter drops them.
        let all = &view.models.get(request.model).holders;
        let hit = view.fleet.idle_holder(all, request.rank, |gpu| (!may_go(gpu), moved(gpu)));
        let hit = hit.filter(|&seat| may_go(view.fleet.gpu_of(seat)));
        if let Some(hit) = hit.filter(|&seat| moved(view.fleet.gpu_of(seat)).is_zero()) {
            return Some((hit, CopyOrigin::Host));
        }
        let firsts = || view.fleet.first_idles(request.rank, COMPARED_MAX);
        let others = firsts().chain((!firsts().any(|seat| seat == idle)).then_some(idle));
        // With few idle seats, the first ones are all of them.
        let few = view.fleet.idle_count(request.rank) <= COMPARED_MAX;
        let holders = || holders().take(if few { 0 } else { COMPARED_MAX });
        let near = (!few).then(|| view.fleet.near(inputs)).into_iter().flatten();
        let beside = holders().flat_map(|holder| view.fleet.peers(holder)).map(|&(_, gpu)| gpu).chain(near);
        let fits = |seat: &SeatIndex| {
            view.fleet.under(*seat).rank >= request.rank && may_go(view.fleet.gpu_of(*seat))
        };
        let all = others.filter(fits).chain(beside.filter_map(idle_seat)).chain(hit);
        let (charge, seat) =
            all.map(|seat| (self.charge(view, view.fleet.gpu_of(seat), request), seat)).min()?;
        if !request.attempts.suspect()
            && !self.ages.is_back(request)
            && let Some((wait, busy)) = self.busy_holder(view, request)
            && wait < charge.cost
            && !self.only_in_time(view, request, wait, charge.swap)
        {
            return Some((busy, CopyOrigin::Host));
        }
        let over = self
            .peer(view, view.fleet.gpu_of(seat), request.model)
            .map_or(CopyOrigin::Host, |(rate, holder)| CopyOrigin::Peer { holder, rate });
        Some((seat, over))
    }

    /// Asserts that a full scan of the GPUs chooses the same GPU, unless too many are idle.
    #[cfg(test)]
    pub(super) fn check_choice(&self, view: &DispatchView<'_>, request: &WaitingRequest) {
        let fits = |seat: &SeatIndex| {
            let rank = view.fleet.under(*seat).rank;
            view.fleet.is_idle(*seat) && rank >= request.rank && self.ages.may_go(request.key, rank)
        };
        let idle: Vec<_> = view.fleet.all_seats().filter(fits).collect();
        let holders = &view.models.get(request.model).holders;
        let Some(&any) = idle.first().filter(|_| idle.len() <= COMPARED_MAX) else { return };
        let gpu_of = |seat: SeatIndex| view.fleet.gpu_of(seat);
        let moved = |seat: SeatIndex| view.fleet.move_time(view.inputs(request), gpu_of(seat));
        let at_once = |seat: &&SeatIndex| holders.contains(gpu_of(**seat)) && moved(**seat).is_zero();
        let by_scan = idle.iter().find(at_once).copied().unwrap_or_else(|| {
            let finishes = idle.iter().map(|&seat| (self.charge(view, gpu_of(seat), request), seat));
            let (charge, seat) =
                finishes.min().unwrap_or((LoadCharge { cost: Duration::MAX, swap: Duration::MAX }, any));
            let busy = self.busy_holder(view, request).filter(|_| !self.ages.is_back(request));
            let busy = busy.filter(|&(wait, _)| {
                wait < charge.cost && !self.only_in_time(view, request, wait, charge.swap)
            });
            busy.map_or(seat, |(_, busy)| busy)
        });
        let chosen = self.choose(view, any, request).map(|(seat, _)| seat);
        assert_eq!(chosen, Some(by_scan), "{request:?} of {:?}", view.inputs(request));
    }

    /// Returns whether a request would be in time with a load, but not with the wait.
    fn only_in_time(
        &self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
        wait: Duration,
        swap: Duration,
    ) -> bool {
        let deadline = self.functions.get(&request.function).and_then(|it| it.objective?.deadline());
        let Some(deadline) = deadline else { return false };
        let run = view.models.run_time(request.model, 0).unwrap_or_default();
        let ends = |after: Duration| view.now + after + run;
        let latest = request.arrived + deadline;
        ends(swap) <= latest && ends(wait) > latest
    }

    /// Returns the busy seat of a holder that first has both finished its requests and received the
    /// request's inputs, with the time until then.
    pub(super) fn busy_holder(
        &self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
    ) -> Option<(Duration, SeatIndex)> {
        let holders = view.models.get(request.model).holders.iter();
        let seats = holders.flat_map(|gpu| view.fleet.get(gpu).seats());
        let takes = |&seat: &SeatIndex| {
            let it = view.fleet.glance(seat);
            it.takes(request.rank) && self.ages.may_go(request.key, it.rank())
        };
        let inputs = view.inputs(request);
        let wait = |seat: SeatIndex| {
            let through = view.fleet.backlog(view.models, view.now, seat)?;
            // The inputs are copied while other requests run.
            Some((through.max(view.fleet.move_time(inputs, view.fleet.gpu_of(seat))), seat))
        };
        seats.filter(takes).take(COMPARED_MAX).filter_map(wait).min()
    }

    /// Returns the fastest direct link from a holder, if faster than the host. A holder with a copy
    /// still in transit cannot serve as a source yet.
    fn peer(
        &self,
        view: &DispatchView<'_>,
        gpu: GpuIndex,
        model: ModelSlot,
    ) -> Option<(BytesPerSec, GpuIndex)> {
        let holders = &view.models.get(model).holders;
        if holders.is_empty() || holders.contains(gpu) {
            return None;
        }
        let it = view.fleet.get(gpu);
        let gives = |peer: &GpuIndex| holders.contains(*peer) && !view.fleet.get(*peer).is_loading(model);
        let &(rate, holder) = view.fleet.peers(gpu).iter().find(|(_, peer)| gives(peer))?;
        let host = view.fleet.swap_time(view.models, gpu, model);
        (it.swap_time(view.models, model, SwapSource::Peer(rate)) < host).then_some((rate, holder))
    }

    /// Returns the cost of bringing a request's model and inputs to a GPU from the best source.
    pub(super) fn charge(
        &self,
        view: &DispatchView<'_>,
        gpu: GpuIndex,
        request: &WaitingRequest,
    ) -> LoadCharge {
        let moved = view.fleet.move_time(view.inputs(request), gpu);
        let LoadCharge { cost, swap } = self.charge_model(view, gpu, request.model);
        LoadCharge { cost: cost.saturating_add(moved), swap: swap.saturating_add(moved) }
    }

    fn charge_model(&self, view: &DispatchView<'_>, gpu: GpuIndex, model: ModelSlot) -> LoadCharge {
        let it = view.fleet.get(gpu);
        if it.holds(model) {
            // A model in transit already has its memory, so nothing is evicted.
            let swap = view.fleet.swap_time(view.models, gpu, model);
            return LoadCharge { cost: swap, swap };
        }
        let swap = match self.peer(view, gpu, model) {
            Some((rate, _)) => it.swap_time(view.models, model, SwapSource::Peer(rate)),
            None => view.fleet.swap_time(view.models, gpu, model),
        };
        let victims = it.victims(view.models.get(model).memory);
        let sole = victims.filter(|(_, victim)| view.models.get(*victim).holders.len() == 1);
        let lost = sole.map(|(used, victim)| {
            let again = it.swap_time(view.models, victim, SwapSource::Host);
            let again = again.as_nanos();
            let age = view.now.since(used).as_nanos();
            let cold = again * COLD_AFTER;
            Duration::from_nanos((again * cold / (cold + age).max(1)) as u64)
        });
        let lost: Duration = lost.sum();
        let percent = if lost.is_zero() { PATIENCE_PERCENT } else { EVICTING_PERCENT };
        LoadCharge { cost: swap * percent / 100 + lost, swap }
    }

    /// Returns whether loading a model onto a busy GPU for its next turn is better than a wait for
    /// a busy holder.
    pub(super) fn worth_bringing(
        &self,
        view: &DispatchView<'_>,
        gpu: GpuIndex,
        left: Duration,
        request: &WaitingRequest,
    ) -> bool {
        if request.attempts.suspect() || view.fleet.get(gpu).rank < request.rank {
            return false;
        }
        let ready = left.max(self.charge(view, gpu, request).cost);
        self.busy_holder(view, request).is_none_or(|(wait, _)| wait > ready)
    }
}
