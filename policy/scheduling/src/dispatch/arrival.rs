//! Policies that serve the oldest request first.

use std::time::Duration;

use millrace_types::GpuIndex;

use super::load_summary;
use super::policy::{CopyOrigin, DispatchDecision, DispatchPolicy, DispatchView, QueueEntry};
use super::queue::{SizeClassQueues, WaitingRequest};
use super::seats::{ExpectedFinish, RECALL_COST};
use millrace_core::ids::SeatIndex;

/// Our own policy. An idle holder of the model gets the request, else the idle GPU that its inputs
/// reach soonest, else the idle GPU with most free memory. If no GPU is idle, the request is
/// assigned behind the running request of the GPU with the earliest expected start.
#[derive(Debug)]
pub(super) struct Fifo {
    lines: SizeClassQueues,
    fronts: Vec<WaitingRequest>,
}

impl Fifo {
    pub(super) fn new(ranks: usize) -> Self {
        Self { lines: SizeClassQueues::new(ranks), fronts: Vec::new() }
    }
}

impl DispatchPolicy for Fifo {
    fn push(&mut self, request: WaitingRequest, _entry: QueueEntry) {
        self.lines.insert(request);
    }

    fn remove(&mut self, request: &WaitingRequest) {
        self.lines.remove(request);
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        self.lines.fronts(&mut self.fronts);
        let place = |request: &WaitingRequest| idle_seat(view, request).or_else(|| busy_seat(view, request));
        let (request, seat) = self.fronts.iter().find_map(|request| Some((*request, place(request)?)))?;
        self.lines.remove(&request);
        Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host })
    }

    fn recalls(&self) -> bool {
        true
    }
}

/// Returns a seat of the idle holder of the request's model that its inputs reach soonest; among
/// equals, of the GPU with most free memory.
fn idle_holder(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<SeatIndex> {
    let holders = &view.models.get(request.model).holders;
    let inputs = view.inputs(request);
    let key = |gpu: GpuIndex| (view.fleet.move_time(inputs, gpu), view.fleet.get(gpu).resident_size());
    view.fleet.idle_holder(holders, request.rank, key)
}

pub(super) fn idle_seat(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<SeatIndex> {
    let any = view.fleet.first_idle(request.rank)?;
    let near = || view.fleet.nearest_idle(view.inputs(request), request.rank, |_| ());
    Some(idle_holder(view, request).or_else(near).unwrap_or(any))
}

/// Returns the busy seat to which a request is assigned behind the running request.
pub(super) fn busy_seat(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<SeatIndex> {
    if request.attempts.suspect() {
        return None;
    }
    let turn = |seat: SeatIndex| {
        view.fleet.expected_free(view.models, view.now, seat, view.fleet.seat(seat).ahead.len())
    };
    let bound = |seat: SeatIndex| view.fleet.glance(seat).soonest(view.models, view.now);
    let bounded = |seat: SeatIndex| ((bound(seat), Duration::ZERO), seat);
    // The inputs are copied while other requests run.
    let inputs = view.inputs(request);
    let begins = |seat: SeatIndex, turn: ExpectedFinish| {
        let moved = view.fleet.move_time(inputs, view.fleet.gpu_of(seat));
        (turn.max(ExpectedFinish::At(view.now + moved)), moved)
    };
    let soon = ExpectedFinish::At(view.now + RECALL_COST);
    let takes = |&seat: &SeatIndex| {
        let it = view.fleet.glance(seat);
        it.takes(request.rank) && (it.nobody_ahead() || bound(seat) <= soon)
    };
    let in_turn = |seat: SeatIndex| {
        let turn = Some(turn(seat)).filter(|&turn| turn <= soon || view.fleet.glance(seat).nobody_ahead());
        Some(begins(seat, turn?))
    };
    let holders = &view.models.get(request.model).holders;
    // A second next request needs a run that ends within RECALL_COST. If no model ever ran that
    // fast, only seats without a next request qualify: scan these if fewer than the holders.
    let alone = view.models.all_take_longer(RECALL_COST) && view.fleet.free_ahead().len() < holders.len();
    let holder = if alone {
        let free = view.fleet.free_ahead().filter(|&seat| holders.contains(view.fleet.gpu_of(seat)));
        load_summary::first(free.filter(takes).map(bounded), in_turn)
    } else {
        let seats = holders.iter().flat_map(|gpu| view.fleet.get(gpu).seats());
        load_summary::first(seats.filter(takes).map(bounded), in_turn)
    };
    let free = || view.fleet.free_ahead().filter(|&seat| view.fleet.under(seat).rank >= request.rank);
    let any = || load_summary::first(free().map(bounded), |seat| Some(begins(seat, turn(seat))));
    holder.or_else(any).map(|(_, seat)| seat)
}

/// Baseline of the LALB paper (L18): any idle GPU, wherever the model is. Assigns nothing to busy
/// GPUs, because a load during another run would exceed the paper's baseline.
#[derive(Debug)]
pub(super) struct Lb {
    lines: SizeClassQueues,
    fronts: Vec<WaitingRequest>,
}

impl Lb {
    pub(super) fn new(ranks: usize) -> Self {
        Self { lines: SizeClassQueues::new(ranks), fronts: Vec::new() }
    }
}

impl DispatchPolicy for Lb {
    fn push(&mut self, request: WaitingRequest, _entry: QueueEntry) {
        self.lines.insert(request);
    }

    fn remove(&mut self, request: &WaitingRequest) {
        self.lines.remove(request);
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        if !view.fleet.any_idle() {
            return None;
        }
        self.lines.fronts(&mut self.fronts);
        let place = |request: &WaitingRequest| Some((*request, view.fleet.first_idle(request.rank)?));
        let (request, seat) = self.fronts.iter().find_map(place)?;
        self.lines.remove(&request);
        Some(DispatchDecision::Assign { request, seat, over: CopyOrigin::Host })
    }
}
