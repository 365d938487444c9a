//! What is chosen by a first look is what looking closely at every GPU chooses.

use std::cmp::Reverse;

use super::*;
use crate::dispatch::gpus::Expected;
use crate::dispatch::{arrival, glance, torpor};

/// Whatever the policy: its choices are asked of what the dispatcher knows, for each model.
pub(super) fn check(dispatch: &Dispatch, now: Timestamp) {
    let view = View { now, fleet: &dispatch.fleet, models: &dispatch.models };
    let gpus = || (0..3).map(GpuIndex);
    for gpu in gpus() {
        let (it, first_look) = (view.fleet.get(gpu), view.fleet.glance(gpu));
        let takes = it.takes_ahead() && it.ahead.len() < AHEAD_MAX;
        assert_eq!(first_look.takes(SizeRank(0), AHEAD_MAX), takes, "{gpu}");
        assert_eq!(first_look.nobody_ahead(), it.ahead.is_empty(), "{gpu}");
    }
    let all: Vec<_> = [A, B, LARGE].into_iter().filter_map(|model| dispatch.models.slot(model)).collect();
    dispatch.policy.check(&view, &all);
    for slot in [A, B, LARGE].into_iter().filter_map(|model| dispatch.models.slot(model)) {
        let Some(rank) = view.models.get(slot).rank else { continue };
        let (key, attempts) = (RequestKey(0), Attempts::new(3, Idempotent::Yes));
        let priority = Priority::default();
        let request = Waiting { key, function: F, model: slot, rank, attempts, priority, arrived: now };
        assert_eq!(arrival::busy_gpu(&view, &request), busy_gpu(&view, &request), "{request:?}");
        assert_eq!(torpor::from_peer(&view, &request), from_peer(&view, &request), "{request:?}");
        for most in [0, 1, 10].map(Duration::from_millis) {
            let own = |gpu: GpuIndex| Duration::from_millis(u64::from(gpu.0 * 2 % 3));
            assert_eq!(first_of(&view, slot, own, most), first_by_scan(&view, slot, own, most), "{slot:?}");
        }
    }
}

fn busy_gpu(view: &View<'_>, request: &Waiting) -> Option<GpuIndex> {
    let turn = |gpu: GpuIndex| {
        let ahead = view.fleet.get(gpu).ahead.len();
        (view.fleet.expected_free(view.models, view.now, gpu, ahead), gpu)
    };
    let holders = view.models.get(request.model).holders.iter();
    let takers = holders.filter(|&gpu| {
        let gpu = view.fleet.get(gpu);
        gpu.takes_ahead() && gpu.rank >= request.rank && gpu.ahead.len() < AHEAD_MAX
    });
    let soon = Expected::At(view.now + RECALL_COST);
    let turns = takers.map(turn).filter(|&(turn, gpu)| turn <= soon || view.fleet.get(gpu).ahead.is_empty());
    let free = || view.fleet.free_ahead().filter(|&gpu| view.fleet.get(gpu).rank >= request.rank);
    turns.min().or_else(|| free().map(turn).min()).map(|(_, gpu)| gpu)
}

fn from_peer(view: &View<'_>, request: &Waiting) -> Option<(Reverse<BytesPerSec>, GpuIndex, GpuIndex)> {
    let holders = view.models.get(request.model).holders.iter();
    let whole = holders.filter(|&gpu| !view.fleet.get(gpu).is_loading(request.model));
    let from_holder = whole.flat_map(|holder| {
        view.fleet.peers(holder).iter().map(move |&(rate, to)| (Reverse(rate), to, holder))
    });
    let faster = from_holder.filter(|&(Reverse(rate), to, _)| {
        view.fleet.takes_now(to, request.rank) && rate > view.fleet.get(to).host_rate
    });
    faster.min()
}

/// As LALB asks, with requests of `own` time that wait for each GPU alone.
fn first_of(
    view: &View<'_>,
    model: Slot,
    own: impl Fn(GpuIndex) -> Duration,
    most: Duration,
) -> Option<(Expected, GpuIndex)> {
    let bound = |gpu: GpuIndex| view.fleet.glance(gpu).soonest(view.models, view.now).and(own(gpu));
    let exact = |gpu: GpuIndex| through(view, gpu, own(gpu), most);
    let in_time = || {
        let bounded = view.models.get(model).holders.iter().map(|gpu| (bound(gpu), gpu));
        bounded.filter(|&(bound, _)| bound < Expected::At(view.now + most))
    };
    let first = glance::first(in_time(), exact);
    assert_eq!(glance::first_of_close(in_time(), exact), first);
    first
}

fn first_by_scan(
    view: &View<'_>,
    model: Slot,
    own: impl Fn(GpuIndex) -> Duration,
    most: Duration,
) -> Option<(Expected, GpuIndex)> {
    let holders = view.models.get(model).holders.iter();
    holders.filter_map(|gpu| Some((through(view, gpu, own(gpu), most)?, gpu))).min()
}

fn through(view: &View<'_>, gpu: GpuIndex, own: Duration, most: Duration) -> Option<Expected> {
    let wait = view.fleet.backlog(view.models, view.now, gpu)? + own;
    (wait < most).then_some(Expected::At(view.now + wait))
}
