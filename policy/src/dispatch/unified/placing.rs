//! Where a request goes: the least estimated finish.

use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex};

use super::{Decision, Unified};
use crate::dispatch::AHEAD_MAX;
use crate::dispatch::cost::Source;
use crate::dispatch::models::Slot;
use crate::dispatch::policy::{Route, View};
use crate::dispatch::queue::Waiting;

/// Idle GPUs that are compared for a load, and holders of a model that are looked at: more make no
/// difference worth the time.
pub(super) const COMPARED_MAX: usize = 8;
/// The time that a request waits for a busy GPU with its model rather than have the model loaded on an idle
/// one, in percent of the load: a load costs other requests a GPU's time too. The charge for evictions is
/// added. Ours, from the papers' workloads: less loads more models than needed under load, more leaves GPUs
/// idle.
const PATIENCE_PERCENT: u32 = 105;
/// What a load is charged where it evicts the last copy of another model, in percent: that one is
/// brought back, and what it then evicts, and so on.
const EVICTING_PERCENT: u32 = 180;
/// The evicted model's own load is charged too: all of it if it was asked for just now, half if that
/// was so many of its loads ago, a third if twice as many, and so on.
const COLD_AFTER: u128 = 24;

/// What bringing a model and data to an idle GPU costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Charge {
    /// With what it does to others.
    pub(super) cost: Duration,
    /// Alone.
    pub(super) swap: Duration,
}

impl Unified {
    /// Gives a request to a GPU.
    pub(super) fn assign(
        &mut self,
        view: &View<'_>,
        request: &Waiting,
        gpu: GpuIndex,
        over: Route,
    ) -> Decision {
        self.send(view, request, gpu);
        Decision::Assign { request: *request, gpu, over }
    }

    /// Gives a request that is next for an idle GPU to that, to another, or behind a busy holder.
    pub(super) fn place(&mut self, view: &View<'_>, idle: GpuIndex, request: &Waiting) -> Option<Decision> {
        let (gpu, over) = self.choose(view, idle, request)?;
        Some(self.assign(view, request, gpu, over))
    }

    /// Gives a request to an idle GPU that holds its model, or to where its data is.
    pub(super) fn place_hit(
        &mut self,
        view: &View<'_>,
        idle: GpuIndex,
        request: &Waiting,
    ) -> Option<Decision> {
        if view.inputs(request).is_empty() {
            return Some(self.assign(view, request, idle, Route::Host));
        }
        self.place(view, idle, request)
    }

    fn choose(&self, view: &View<'_>, idle: GpuIndex, request: &Waiting) -> Option<(GpuIndex, Route)> {
        let fits = |gpu: GpuIndex| {
            view.fleet.takes_now(gpu, request.rank) && self.ages.may_go(request.key, view.fleet.get(gpu).rank)
        };
        let inputs = view.inputs(request);
        let moved = |gpu: GpuIndex| view.fleet.move_time(inputs, gpu);
        let holders = || view.models.get(request.model).holders.iter();
        // Those where an older one is at its limit come last, and are left out.
        let all = &view.models.get(request.model).holders;
        let hit = view.fleet.idle_holder(all, request.rank, |gpu| (!fits(gpu), moved(gpu)));
        let hit = hit.filter(|&gpu| fits(gpu));
        if let Some(hit) = hit.filter(|&gpu| moved(gpu).is_zero()) {
            return Some((hit, Route::Host));
        }
        let firsts = || view.fleet.first_idles(request.rank, COMPARED_MAX);
        let others = firsts().chain((!firsts().any(|gpu| gpu == idle)).then_some(idle));
        // Where so few are idle, all of them are among the first.
        let few = view.fleet.idle_count(request.rank) <= COMPARED_MAX;
        let holders = || holders().take(if few { 0 } else { COMPARED_MAX });
        let near = (!few).then(|| view.fleet.near(inputs)).into_iter().flatten();
        let beside = holders().flat_map(|holder| view.fleet.peers(holder)).map(|&(_, gpu)| gpu).chain(near);
        let all = others.chain(beside).chain(hit).filter(|&gpu| fits(gpu));
        let (charge, gpu) = all.map(|gpu| (self.charge(view, gpu, request), gpu)).min()?;
        if !request.attempts.suspect()
            && !self.ages.is_back(request)
            && let Some((wait, busy)) = self.busy_holder(view, request)
            && wait < charge.cost
            && !self.only_in_time(view, request, wait, charge.swap)
        {
            return Some((busy, Route::Host));
        }
        let over = self
            .peer(view, gpu, request.model)
            .map_or(Route::Host, |(rate, holder)| Route::Peer { holder, rate });
        Some((gpu, over))
    }

    /// Asserts that the GPU chosen is the one that looking at every GPU chooses, where not too many are
    /// idle.
    #[cfg(test)]
    pub(super) fn check_choice(&self, view: &View<'_>, request: &Waiting) {
        let fits = |gpu: &GpuIndex| {
            let rank = view.fleet.get(*gpu).rank;
            view.fleet.takes_now(*gpu, request.rank) && self.ages.may_go(request.key, rank)
        };
        let idle: Vec<_> = view.fleet.all().filter(fits).collect();
        let holders = &view.models.get(request.model).holders;
        let Some(&any) = idle.first().filter(|_| idle.len() <= COMPARED_MAX) else { return };
        let moved = |gpu: &GpuIndex| view.fleet.move_time(view.inputs(request), *gpu);
        let at_once = |gpu: &&GpuIndex| holders.contains(**gpu) && moved(gpu).is_zero();
        let by_scan = idle.iter().find(at_once).copied().unwrap_or_else(|| {
            let finishes = idle.iter().map(|&gpu| (self.charge(view, gpu, request), gpu));
            let (charge, gpu) =
                finishes.min().unwrap_or((Charge { cost: Duration::MAX, swap: Duration::MAX }, any));
            let busy = self.busy_holder(view, request).filter(|_| !self.ages.is_back(request));
            let busy = busy.filter(|&(wait, _)| {
                wait < charge.cost && !self.only_in_time(view, request, wait, charge.swap)
            });
            busy.map_or(gpu, |(_, busy)| busy)
        });
        let chosen = self.choose(view, any, request).map(|(gpu, _)| gpu);
        assert_eq!(chosen, Some(by_scan), "{request:?} of {:?}", view.inputs(request));
    }

    /// Whether a request would be in time with its model brought, and not if it waits.
    fn only_in_time(&self, view: &View<'_>, request: &Waiting, wait: Duration, swap: Duration) -> bool {
        let deadline = self.functions.get(&request.function).and_then(|it| it.objective?.deadline());
        let Some(deadline) = deadline else { return false };
        let run = view.models.run_time(request.model, 0).unwrap_or_default();
        let ends = |after: Duration| view.now + after + run;
        let latest = request.arrived + deadline;
        ends(swap) <= latest && ends(wait) > latest
    }

    /// The busy holder that is through with what it has, and has the request's data, first; and when.
    pub(super) fn busy_holder(&self, view: &View<'_>, request: &Waiting) -> Option<(Duration, GpuIndex)> {
        let holders = view.models.get(request.model).holders.iter();
        let takes = |&gpu: &GpuIndex| {
            let it = view.fleet.glance(gpu);
            it.takes(request.rank, AHEAD_MAX) && self.ages.may_go(request.key, it.rank())
        };
        let inputs = view.inputs(request);
        let wait = |gpu: GpuIndex| {
            let through = view.fleet.backlog(view.models, view.now, gpu)?;
            // Its data comes while others run.
            Some((through.max(view.fleet.move_time(inputs, gpu)), gpu))
        };
        holders.filter(takes).take(COMPARED_MAX).filter_map(wait).min()
    }

    /// The fastest direct link from a holder, where that beats the host. One whose own copy is still on
    /// its way has nothing to give yet.
    fn peer(&self, view: &View<'_>, gpu: GpuIndex, model: Slot) -> Option<(BytesPerSec, GpuIndex)> {
        let holders = &view.models.get(model).holders;
        if holders.is_empty() || holders.contains(gpu) {
            return None;
        }
        let it = view.fleet.get(gpu);
        let gives = |peer: &GpuIndex| holders.contains(*peer) && !view.fleet.get(*peer).is_loading(model);
        let &(rate, holder) = view.fleet.peers(gpu).iter().find(|(_, peer)| gives(peer))?;
        let host = view.fleet.swap_time(view.models, gpu, model);
        (it.swap_time(view.models, model, Source::Peer(rate)) < host).then_some((rate, holder))
    }

    /// What bringing a request's model and data to a GPU costs, from wherever is best.
    pub(super) fn charge(&self, view: &View<'_>, gpu: GpuIndex, request: &Waiting) -> Charge {
        let moved = view.fleet.move_time(view.inputs(request), gpu);
        let Charge { cost, swap } = self.charge_model(view, gpu, request.model);
        Charge { cost: cost.saturating_add(moved), swap: swap.saturating_add(moved) }
    }

    fn charge_model(&self, view: &View<'_>, gpu: GpuIndex, model: Slot) -> Charge {
        let it = view.fleet.get(gpu);
        if it.holds(model) {
            // What is on its way has its room already.
            let swap = view.fleet.swap_time(view.models, gpu, model);
            return Charge { cost: swap, swap };
        }
        let swap = match self.peer(view, gpu, model) {
            Some((rate, _)) => it.swap_time(view.models, model, Source::Peer(rate)),
            None => view.fleet.swap_time(view.models, gpu, model),
        };
        let victims = it.victims(view.models.get(model).blocks);
        let sole = victims.filter(|(_, victim)| view.models.get(*victim).holders.len() == 1);
        let lost = sole.map(|(used, victim)| {
            let again = it.swap_time(view.models, victim, Source::Host);
            let (again, age) = (again.as_nanos(), view.now.since(used).as_nanos());
            let cold = again * COLD_AFTER;
            Duration::from_nanos((again * cold / (cold + age).max(1)) as u64)
        });
        let lost: Duration = lost.sum();
        let percent = if lost.is_zero() { PATIENCE_PERCENT } else { EVICTING_PERCENT };
        Charge { cost: swap * percent / 100 + lost, swap }
    }

    /// Whether a model is better brought to a busy GPU ahead of its turn than waited for elsewhere.
    pub(super) fn worth_bringing(
        &self,
        view: &View<'_>,
        gpu: GpuIndex,
        left: Duration,
        request: &Waiting,
    ) -> bool {
        if request.attempts.suspect() || view.fleet.get(gpu).rank < request.rank {
            return false;
        }
        let ready = left.max(self.charge(view, gpu, request).cost);
        self.busy_holder(view, request).is_none_or(|(wait, _)| wait > ready)
    }
}
