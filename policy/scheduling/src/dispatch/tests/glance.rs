//! Equivalence of searches through load summaries and full scans of every seat.

use std::cmp::Reverse;

use super::*;
use crate::dispatch::seats::ExpectedFinish;
use crate::dispatch::{arrival, load_summary, torpor};

/// Checks the searches of all policies against full scans, for each model.
pub(super) fn check(dispatch: &Dispatcher, now: Timestamp) {
    let fleet = &dispatch.fleet;
    for seat in fleet.all_seats() {
        let it = fleet.seat(seat);
        let first_look = fleet.glance(seat);
        let gpu = fleet.under(seat);
        let accepts =
            gpu.executor.is_some() && !gpu.held_for_suspect && gpu.is_open(seat) && it.accepts_queued();
        assert_eq!(first_look.takes(SizeRank(0)), accepts && it.ahead.len() < it.ahead_max, "{seat}");
        assert_eq!(first_look.nobody_ahead(), it.ahead.is_empty(), "{seat}");
    }
    check_indexes(dispatch);
    let all: Vec<_> = [A, B, LARGE].into_iter().filter_map(|model| dispatch.models.slot(model)).collect();
    for read in [&[][..], &[(0, 32)], &[(1, 1), (2, 16)]] {
        check_with(dispatch, now, &all, data(read));
    }
}

/// Checks the indexes of seats, and the seats in use of each GPU, against a scan of all seats, open or
/// closed.
pub(super) fn check_indexes(dispatch: &Dispatcher) {
    let fleet = &dispatch.fleet;
    let takes = |seat: SeatIndex| {
        let gpu = fleet.under(seat);
        gpu.executor.is_some() && !gpu.held_for_suspect && gpu.is_open(seat)
    };
    let idle = |&seat: &SeatIndex| takes(seat) && fleet.seat(seat).running.is_none();
    assert_eq!(fleet.all_idle(), fleet.all_seats().filter(idle).collect::<Vec<_>>());
    let free_ahead = |&seat: &SeatIndex| {
        let it = fleet.seat(seat);
        let normal = it.running.is_some_and(|held| !held.request.attempts.suspect());
        takes(seat) && normal && it.ahead.is_empty()
    };
    let by_scan: Vec<_> = fleet.all_seats().filter(free_ahead).collect();
    assert_eq!(fleet.free_ahead().collect::<Vec<_>>(), by_scan);
    let askable: Vec<_> = fleet.all_seats().filter(|&seat| fleet.seat(seat).recallable().is_some()).collect();
    assert_eq!(fleet.askable().collect::<Vec<_>>(), askable);
    for gpu in fleet.all() {
        let it = fleet.get(gpu);
        let in_use = |&seat: &SeatIndex| it.is_open(seat) || fleet.seat(seat).running.is_some();
        let last = fleet.all_seats().filter(|&seat| fleet.gpu_of(seat) == gpu).filter(in_use).last();
        assert_eq!(it.seats().last(), last, "{gpu}");
        if it.seats().len() > 1 {
            let suspect_runs = fleet.seats_of(gpu).any(|(_, seat)| seat.runs_suspect());
            assert_eq!(it.held_for_suspect, suspect_runs || !it.suspects.is_empty(), "{gpu}");
        }
    }
}

/// Checks the same for requests with these inputs.
pub(super) fn check_with(dispatch: &Dispatcher, now: Timestamp, models: &[ModelSlot], read: InputLocations) {
    let inputs = BTreeMap::from([(RequestKey(0), read)]);
    let view = DispatchView { now, fleet: &dispatch.fleet, models: &dispatch.models, inputs: &inputs };
    dispatch.policy.check(&view, models);
    for (request, slot) in requests_of(&view, models) {
        assert_eq!(
            arrival::idle_seat(&view, &request),
            idle_seat(&view, &request),
            "{request:?} of {read:?}"
        );
        assert_eq!(
            arrival::busy_seat(&view, &request),
            busy_seat(&view, &request),
            "{request:?} of {read:?}"
        );
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

/// Returns the seats of all holders of a request's model.
fn holders<'a>(view: &'a DispatchView<'_>, request: &WaitingRequest) -> impl Iterator<Item = SeatIndex> + 'a {
    let holders = view.models.get(request.model).holders.iter();
    holders.flat_map(|gpu| view.fleet.get(gpu).seats())
}

fn is_idle(view: &DispatchView<'_>, seat: SeatIndex, rank: SizeRank) -> bool {
    view.fleet.is_idle(seat) && view.fleet.under(seat).rank >= rank
}

fn idle_seat(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<SeatIndex> {
    let moved = |seat| view.fleet.move_time(view.inputs(request), view.fleet.gpu_of(seat));
    let idle = holders(view, request).filter(|&seat| is_idle(view, seat, request.rank));
    let holder = idle.min_by_key(|&seat| (moved(seat), view.fleet.under(seat).resident_size(), seat));
    holder.or_else(|| nearest_idle(view, request, |_| ()))
}

/// Scans all idle seats. Seats that the inputs reach over the host count only if they are first.
fn nearest_idle<C: Ord>(
    view: &DispatchView<'_>,
    request: &WaitingRequest,
    class: impl Fn(GpuIndex) -> C,
) -> Option<SeatIndex> {
    let fleet = view.fleet;
    let inputs = view.inputs(request);
    let idle = || fleet.all_seats().filter(|&seat| is_idle(view, seat, request.rank));
    let first = idle().min_by_key(|&seat| (fleet.idle_place(seat), seat));
    let near = |gpu: GpuIndex| inputs.iter().any(|(from, _)| from == gpu || fleet.way(from, gpu).is_some());
    // Of a GPU that is near, the first idle seat counts.
    let counts = |seat: SeatIndex| {
        let gpu = fleet.gpu_of(seat);
        near(gpu) && fleet.idle_seat(gpu, request.rank) == Some(seat)
    };
    let all = idle().filter(|&seat| Some(seat) == first || counts(seat));
    all.min_by_key(|&seat| {
        let gpu = fleet.gpu_of(seat);
        (class(gpu), fleet.move_time(inputs, gpu), fleet.idle_place(seat), seat)
    })
}

fn busy_seat(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<SeatIndex> {
    let turn = |seat: SeatIndex| {
        let ahead = view.fleet.seat(seat).ahead.len();
        (view.fleet.expected_free(view.models, view.now, seat, ahead), seat)
    };
    let begins = |(turn, seat): (ExpectedFinish, SeatIndex)| {
        let moved = view.fleet.move_time(view.inputs(request), view.fleet.gpu_of(seat));
        (turn.max(ExpectedFinish::At(view.now + moved)), moved, seat)
    };
    let takers = holders(view, request).filter(|&seat| {
        view.fleet.accepts_queued(seat)
            && view.fleet.under(seat).rank >= request.rank
            && view.fleet.seat(seat).ahead.len() < view.fleet.seat(seat).ahead_max
    });
    let soon = ExpectedFinish::At(view.now + RECALL_COST);
    let turns =
        takers.map(turn).filter(|&(turn, seat)| turn <= soon || view.fleet.seat(seat).ahead.is_empty());
    let free = || view.fleet.free_ahead().filter(|&seat| view.fleet.under(seat).rank >= request.rank);
    let free_first = || free().map(turn).map(begins).min();
    turns.map(begins).min().or_else(free_first).map(|(.., seat)| seat)
}

fn from_peer(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<torpor::PeerCopy> {
    let holders = view.models.get(request.model).holders.iter();
    let whole = holders.filter(|&gpu| !view.fleet.get(gpu).is_loading(request.model));
    let moved = |to| view.fleet.move_time(view.inputs(request), to);
    let from_holder = whole.flat_map(|holder| {
        let to_idle = move |&(rate, to)| Some((rate, to, view.fleet.idle_seat(to, request.rank)?, holder));
        view.fleet.peers(holder).iter().filter_map(to_idle)
    });
    let faster = from_holder.filter(|&(rate, to, ..)| rate > view.fleet.get(to).host_rate);
    faster.map(|(rate, to, seat, holder)| (Reverse(rate), moved(to), seat, holder)).min()
}

/// Searches as LALB does, with requests of `own` time in each GPU's own queue.
fn first_of(
    view: &DispatchView<'_>,
    model: ModelSlot,
    own: impl Fn(GpuIndex) -> Duration,
    most: Duration,
) -> Option<(ExpectedFinish, SeatIndex)> {
    let own = |seat| own(view.fleet.gpu_of(seat));
    let bound = |seat| view.fleet.glance(seat).soonest(view.models, view.now).and(own(seat));
    let exact = |seat| through(view, seat, own(seat), most);
    let in_time = || {
        let seats = view.models.get(model).holders.iter().flat_map(|gpu| view.fleet.get(gpu).seats());
        let bounded = seats.map(|seat| (bound(seat), seat));
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
) -> Option<(ExpectedFinish, SeatIndex)> {
    let seats = view.models.get(model).holders.iter().flat_map(|gpu| view.fleet.get(gpu).seats());
    seats.filter_map(|seat| Some((through(view, seat, own(view.fleet.gpu_of(seat)), most)?, seat))).min()
}

fn through(
    view: &DispatchView<'_>,
    seat: SeatIndex,
    own: Duration,
    most: Duration,
) -> Option<ExpectedFinish> {
    let wait = view.fleet.backlog(view.models, view.now, seat)? + own;
    (wait < most).then_some(ExpectedFinish::At(view.now + wait))
}
