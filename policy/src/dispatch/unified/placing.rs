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
/// What a load is charged where it evicts the last copy of another model, in percent: that one is
/// brought back, and what it then evicts, and so on.
const EVICTING_PERCENT: u32 = 180;
/// The evicted model's own load is charged too: all of it if it was asked for just now, half if that
/// was so many of its loads ago, a third if twice as many, and so on.
const COLD_AFTER: u128 = 24;

/// What bringing a model to an idle GPU costs.
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

    /// Where a request goes that is next for an idle GPU: there, to another, or behind a busy holder.
    pub(super) fn place(&mut self, view: &View<'_>, idle: GpuIndex, request: &Waiting) -> Option<Decision> {
        let fits = |gpu: GpuIndex| {
            view.fleet.takes_now(gpu, request.rank) && self.ages.may_go(request.key, view.fleet.get(gpu).rank)
        };
        let holders = || view.models.get(request.model).holders.iter();
        // Those where an older one is at its limit come last, and are left out.
        let all = &view.models.get(request.model).holders;
        if let Some(hit) =
            view.fleet.idle_holder(all, request.rank, |gpu| !fits(gpu)).filter(|&gpu| fits(gpu))
        {
            return Some(self.assign(view, request, hit, Route::Host));
        }
        let firsts = || view.fleet.first_idles(request.rank, COMPARED_MAX);
        let others = firsts().chain((!firsts().any(|gpu| gpu == idle)).then_some(idle));
        let beside = holders().take(COMPARED_MAX).flat_map(|holder| view.fleet.peers(holder));
        let all = others.chain(beside.map(|&(_, gpu)| gpu)).filter(|&gpu| fits(gpu));
        let (charge, gpu) = all.map(|gpu| (self.charge(view, gpu, request.model), gpu)).min()?;
        if !request.attempts.suspect()
            && !self.ages.is_back(request)
            && let Some((wait, busy)) = self.busy_holder(view, request)
            && wait < charge.cost
            && !self.only_in_time(view, request, wait, charge.swap)
        {
            return Some(self.assign(view, request, busy, Route::Host));
        }
        let over = self
            .peer(view, gpu, request.model)
            .map_or(Route::Host, |(rate, holder)| Route::Peer { holder, rate });
        Some(self.assign(view, request, gpu, over))
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

    /// The busy holder that is through with what it has first, and when.
    pub(super) fn busy_holder(&self, view: &View<'_>, request: &Waiting) -> Option<(Duration, GpuIndex)> {
        let holders = view.models.get(request.model).holders.iter();
        let takes = |&gpu: &GpuIndex| {
            let it = view.fleet.glance(gpu);
            it.takes(request.rank, AHEAD_MAX) && self.ages.may_go(request.key, it.rank())
        };
        let waits = holders.filter(takes).take(COMPARED_MAX);
        waits.filter_map(|gpu| Some((view.fleet.backlog(view.models, view.now, gpu)?, gpu))).min()
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

    /// What bringing a model to a GPU costs, from wherever is best.
    pub(super) fn charge(&self, view: &View<'_>, gpu: GpuIndex, model: Slot) -> Charge {
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
        let percent = if lost.is_zero() { self.config.patience_percent } else { EVICTING_PERCENT };
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
        let ready = left.max(self.charge(view, gpu, request.model).cost);
        self.busy_holder(view, request).is_none_or(|(wait, _)| wait > ready)
    }
}
