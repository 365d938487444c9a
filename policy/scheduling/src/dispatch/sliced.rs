//! Functions with slices. On a shared GPU such a function computes on the seats of its slices alone:
//! a slice has one seat, which takes the requests of the slice's function and of no other. The
//! dispatch policy knows neither these seats nor these requests.
//!
//! ```text
//! Enqueue ─┬─ function without slices ─► policy ─► open seats
//!          └─ function with slices ─► own queue ─► seats of its slices
//! ```
//!
//! The oldest request of the highest priority goes to a free slice on a GPU that holds the model, else
//! to the slice with the least id. Without a slice on this node the requests wait. A slice keeps a warm
//! copy of the model on its GPU.
//!
//! A suspect goes to the policy, because a suspect has to run alone on its GPU.

use std::collections::BTreeSet;

use millrace_types::{GpuIndex, ModelId, Priority, SliceId, Timestamp};

use super::dispatcher::{Dispatcher, RequestLocation};
use super::policy::{CopyOrigin, QueueEntry};
use super::protocol::Action;
use super::queue::WaitingRequest;
use super::slice_table::{Slice, SlicedFunction};
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};

impl Dispatcher {
    /// Returns the slice to which a seat belongs; `None` for a seat of all functions.
    #[must_use]
    pub fn slice_on(&self, seat: SeatIndex) -> Option<SliceId> {
        self.sliced.slice_on(seat)
    }

    /// Sets the slices of a function on this node. `None`: the function has no slices, and its
    /// requests go to any GPU.
    pub(super) fn set_slices(
        &mut self,
        function: FunctionIndex,
        model: ModelId,
        slices: Option<Vec<(SliceId, GpuIndex)>>,
        actions: &mut Vec<Action>,
    ) {
        let before = self.sliced.take(function);
        let is_new = before.is_none();
        let (had, waiting) = before.map(|it| (it.slices, it.waiting)).unwrap_or_default();
        let wanted = slices.as_deref().unwrap_or_default();
        let (kept, gone): (Vec<_>, Vec<_>) =
            had.into_iter().partition(|slice| wanted.contains(&(slice.id, slice.gpu)));
        for Slice { gpu, seat, .. } in gone {
            seat.into_iter().for_each(|seat| self.fleet.close_slice_seat(gpu, seat));
        }
        match slices {
            Some(wanted) => {
                let seat_of = |id| kept.iter().find(|slice| slice.id == id).and_then(|slice| slice.seat);
                let slice = |(id, gpu)| Slice { id, gpu, seat: seat_of(id) };
                let mut slices: Vec<_> = wanted.into_iter().map(slice).collect();
                slices.sort_unstable_by_key(|slice| slice.id);
                self.sliced.insert(function, SlicedFunction { model, slices, waiting });
                if is_new {
                    self.take_from_policy(function, actions);
                }
            }
            None => self.return_to_policy(waiting),
        }
        self.keep_on(model, self.sliced.gpus_of(model), actions);
    }

    fn return_to_policy(&mut self, waiting: BTreeSet<(Priority, RequestKey)>) {
        for (_, key) in waiting {
            if let Some(&RequestLocation::Queued { request, .. }) = self.places.get(&key) {
                self.policy.push(request, QueueEntry::New);
            }
        }
    }

    /// Moves the waiting requests of a function from the policy to the function's own queue.
    fn take_from_policy(&mut self, function: FunctionIndex, actions: &mut Vec<Action>) {
        let waiting = self.places.values().filter_map(|place| match *place {
            RequestLocation::Queued { request, reserved } => Some((request, reserved)),
            RequestLocation::On(_) => None,
        });
        let own = waiting.filter(|(request, _)| request.function == function && self.sliced.has(request));
        for (request, reserved) in own.collect::<Vec<_>>() {
            self.policy.remove(&request);
            self.unpin(&request, reserved, actions);
            self.places.insert(request.key, RequestLocation::Queued { request, reserved: None });
            self.sliced.push(&request);
        }
    }

    /// Gives seats to slices without a seat, and requests to slices without a request.
    pub(super) fn assign_sliced(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.sliced.seat_slices(|gpu| self.fleet.open_slice_seat(gpu));
        while let Some((request, seat)) = self.next_sliced() {
            self.sliced.remove(&request);
            self.assign(now, request, seat, CopyOrigin::Host, actions);
        }
    }

    fn next_sliced(&self) -> Option<(WaitingRequest, SeatIndex)> {
        self.sliced.ready().find_map(|function| {
            let &(_, key) = function.waiting.first()?;
            let &RequestLocation::Queued { request, .. } = self.places.get(&key)? else { return None };
            let seats = function.slices.iter().filter_map(|slice| slice.seat);
            let fits = |seat: SeatIndex| self.fleet.under(seat).rank >= request.rank;
            let mut free = seats.filter(|&seat| fits(seat) && self.fleet.is_free_slice_seat(seat));
            let first = free.next()?;
            let holds = |&seat: &SeatIndex| self.fleet.under(seat).holds(request.model);
            let holder = [first].into_iter().chain(free).find(holds);
            Some((request, holder.unwrap_or(first)))
        })
    }
}
