//! Equivalence of searches through load summaries and full scans of every GPU.

use std::cmp::Reverse;

use super::*;
use crate::dispatch::gpus::ExpectedFinish;
use crate::dispatch::{arrival, load_summary, torpor};

/// Checks the searches of all policies against full scans, for each model.
pub(super) fn check(dispatch: &Dispatcher, now: Timestamp) {
    let fleet = &dispatch.fleet;
    let gpus = || (0..3).map(GpuIndex);
    for gpu in gpus() {
        let it = fleet.get(gpu);
        let first_look = fleet.glance(gpu);
        let takes = it.accepts_queued() && it.ahead.len() < AHEAD_MAX;
        assert_eq!(first_look.takes(SizeRank(0), AHEAD_MAX), takes, "{gpu}");
        assert_eq!(first_look.nobody_ahead(), it.ahead.is_empty(), "{gpu}");
    }
    let all: Vec<_> = [A, B, LARGE].into_iter().filter_map(|model| dispatch.models.slot(model)).collect();
    for read in [&[][..], &[(0, 32)], &[(1, 1), (2, 16)]] {
        check_with(dispatch, now, &all, data(read));
    }
}

/// Checks the same for requests with these inputs.
pub(super) fn check_with(dispatch: &Dispatcher, now: Timestamp, models: &[ModelSlot], read: InputLocations) {
    let inputs = BTreeMap::from([(RequestKey(0), read)]);
    let view = DispatchView { now, fleet: &dispatch.fleet, models: &dispatch.models, inputs: &inputs };
    dispatch.policy.check(&view, models);
    for (request, slot) in requests_of(&view, models) {
        assert_eq!(arrival::idle_gpu(&view, &request), idle_gpu(&view, &request), "{request:?} of {read:?}");
        assert_eq!(arrival::busy_gpu(&view, &request), busy_gpu(&view, &request), "{request:?} of {read:?}");
        assert_eq!(torpor::from_peer(&view, &request), from_peer(&view, &request), "{request:?} of {read:?}");
        let calm = |gpu: GpuIndex| view.fleet.loading_beside(gpu);
        let nearest = view.fleet.nearest_idle(&read, request.rank, calm);
        assert_eq!(nearest, nearest_idle(&view, &request, calm), "{request:?} of {read:?}");
        for most in [0, 1, 10].map(Duration::from_millis) {
            let own = |gpu: GpuIndex| Duration::from_millis(u64::from(gpu.0 * 2 % 3));
            assert_eq!(first_of(&view, slot, own, most), first_by_scan(&view, slot, own, most), "{slot:?}");
        }
    }
}

fn idle_gpu(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<GpuIndex> {
    let moved = |gpu: GpuIndex| view.fleet.move_time(view.inputs(request), gpu);
    let holders = view.models.get(request.model).holders.iter();
    let idle = holders.filter(|&gpu| view.fleet.takes_now(gpu, request.rank));
    let holder = idle.min_by_key(|&gpu| (moved(gpu), view.fleet.get(gpu).resident_size(), gpu));
    holder.or_else(|| nearest_idle(view, request, |_| ()))
}

/// Scans all idle GPUs. GPUs that the inputs reach over the host count only if they are first.
fn nearest_idle<C: Ord>(
    view: &DispatchView<'_>,
    request: &WaitingRequest,
    class: impl Fn(GpuIndex) -> C,
) -> Option<GpuIndex> {
    let fleet = view.fleet;
    let inputs = view.inputs(request);
    let idle = || fleet.all().filter(|&gpu| fleet.takes_now(gpu, request.rank));
    let first = idle().min_by_key(|&gpu| (fleet.idle_place(gpu), gpu));
    let near = |gpu: GpuIndex| inputs.iter().any(|(from, _)| from == gpu || fleet.way(from, gpu).is_some());
    let all = idle().filter(|&gpu| Some(gpu) == first || near(gpu));
    all.min_by_key(|&gpu| (class(gpu), fleet.move_time(inputs, gpu), fleet.idle_place(gpu), gpu))
}

fn busy_gpu(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<GpuIndex> {
    let turn = |gpu: GpuIndex| {
        let ahead = view.fleet.get(gpu).ahead.len();
        (view.fleet.expected_free(view.models, view.now, gpu, ahead), gpu)
    };
    let begins = |(turn, gpu): (ExpectedFinish, GpuIndex)| {
        let moved = view.fleet.move_time(view.inputs(request), gpu);
        (turn.max(ExpectedFinish::At(view.now + moved)), moved, gpu)
    };
    let holders = view.models.get(request.model).holders.iter();
    let takers = holders.filter(|&gpu| {
        let gpu = view.fleet.get(gpu);
        gpu.accepts_queued() && gpu.rank >= request.rank && gpu.ahead.len() < AHEAD_MAX
    });
    let soon = ExpectedFinish::At(view.now + RECALL_COST);
    let turns = takers.map(turn).filter(|&(turn, gpu)| turn <= soon || view.fleet.get(gpu).ahead.is_empty());
    let free = || view.fleet.free_ahead().filter(|&gpu| view.fleet.get(gpu).rank >= request.rank);
    let free_first = || free().map(turn).map(begins).min();
    turns.map(begins).min().or_else(free_first).map(|(.., gpu)| gpu)
}

fn from_peer(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<torpor::PeerCopy> {
    let holders = view.models.get(request.model).holders.iter();
    let whole = holders.filter(|&gpu| !view.fleet.get(gpu).is_loading(request.model));
    let from_holder = whole.flat_map(|holder| {
        let moved = |to| view.fleet.move_time(view.inputs(request), to);
        view.fleet.peers(holder).iter().map(move |&(rate, to)| (Reverse(rate), moved(to), to, holder))
    });
    let faster = from_holder.filter(|&(Reverse(rate), _, to, _)| {
        view.fleet.takes_now(to, request.rank) && rate > view.fleet.get(to).host_rate
    });
    faster.min()
}

/// Searches as LALB does, with requests of `own` time in each GPU's own queue.
fn first_of(
    view: &DispatchView<'_>,
    model: ModelSlot,
    own: impl Fn(GpuIndex) -> Duration,
    most: Duration,
) -> Option<(ExpectedFinish, GpuIndex)> {
    let bound = |gpu: GpuIndex| view.fleet.glance(gpu).soonest(view.models, view.now).and(own(gpu));
    let exact = |gpu: GpuIndex| through(view, gpu, own(gpu), most);
    let in_time = || {
        let bounded = view.models.get(model).holders.iter().map(|gpu| (bound(gpu), gpu));
        bounded.filter(|&(bound, _)| bound < ExpectedFinish::At(view.now + most))
    };
    let first = load_summary::first(in_time(), exact);
    assert_eq!(load_summary::first_of_close(in_time(), exact), first);
    first
}

fn first_by_scan(
    view: &DispatchView<'_>,
    model: ModelSlot,
    own: impl Fn(GpuIndex) -> Duration,
    most: Duration,
) -> Option<(ExpectedFinish, GpuIndex)> {
    let holders = view.models.get(model).holders.iter();
    holders.filter_map(|gpu| Some((through(view, gpu, own(gpu), most)?, gpu))).min()
}

fn through(view: &DispatchView<'_>, gpu: GpuIndex, own: Duration, most: Duration) -> Option<ExpectedFinish> {
    let wait = view.fleet.backlog(view.models, view.now, gpu)? + own;
    (wait < most).then_some(ExpectedFinish::At(view.now + wait))
}
