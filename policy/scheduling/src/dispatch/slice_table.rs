//! The functions with slices of a node: their slices, and the requests that wait for them.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{GpuIndex, ModelId, Priority, SliceId};

use super::queue::WaitingRequest;
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};

/// A slice of a GPU of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slice {
    pub(super) id: SliceId,
    pub(super) gpu: GpuIndex,
    /// `None` while all seats for slices of the GPU have a slice or a request.
    pub(super) seat: Option<SeatIndex>,
}

/// A function with slices.
#[derive(Debug)]
pub(super) struct SlicedFunction {
    pub(super) model: ModelId,
    /// By id.
    pub(super) slices: Vec<Slice>,
    pub(super) waiting: BTreeSet<(Priority, RequestKey)>,
}

/// The functions with slices of a node. The indexes bound the work of an event by the number of slices with
/// seats, not by the number of functions.
#[derive(Debug, Default)]
pub(super) struct SlicedFunctions {
    functions: BTreeMap<FunctionIndex, SlicedFunction>,
    of_model: BTreeSet<(ModelId, FunctionIndex)>,
    /// Functions with a waiting request and a slice with a seat.
    ready: BTreeSet<FunctionIndex>,
    /// Functions with a slice without a seat.
    seatless: BTreeSet<FunctionIndex>,
    /// The slice of each seat that belongs to a slice.
    on: BTreeMap<SeatIndex, SliceId>,
}

impl SlicedFunctions {
    /// Returns whether a request waits for, or belongs on, the seat of a slice.
    pub(super) fn has(&self, request: &WaitingRequest) -> bool {
        !request.attempts.suspect() && self.functions.contains_key(&request.function)
    }

    pub(super) fn push(&mut self, request: &WaitingRequest) {
        if let Some(function) = self.functions.get_mut(&request.function) {
            function.waiting.insert((request.priority, request.key));
            self.update_indexes(request.function);
        }
    }

    /// Removes a waiting request. Returns whether the request waited here.
    pub(super) fn remove(&mut self, request: &WaitingRequest) -> bool {
        let function = self.functions.get_mut(&request.function);
        let waited =
            function.is_some_and(|function| function.waiting.remove(&(request.priority, request.key)));
        if waited {
            self.update_indexes(request.function);
        }
        waited
    }

    /// Adds a function that is not in the table.
    pub(super) fn insert(&mut self, index: FunctionIndex, function: SlicedFunction) {
        self.of_model.insert((function.model, index));
        self.on.extend(function.slices.iter().filter_map(|slice| Some((slice.seat?, slice.id))));
        self.functions.insert(index, function);
        self.update_indexes(index);
    }

    /// Removes a function with its slices and waiting requests.
    pub(super) fn take(&mut self, index: FunctionIndex) -> Option<SlicedFunction> {
        let function = self.functions.remove(&index)?;
        self.of_model.remove(&(function.model, index));
        for seat in function.slices.iter().filter_map(|slice| slice.seat) {
            self.on.remove(&seat);
        }
        self.update_indexes(index);
        Some(function)
    }

    /// Gives seats to slices without a seat, as far as `open` finds any on the slice's GPU.
    pub(super) fn seat_slices(&mut self, mut open: impl FnMut(GpuIndex) -> Option<SeatIndex>) {
        for index in self.seatless.clone() {
            let Some(function) = self.functions.get_mut(&index) else { continue };
            for slice in function.slices.iter_mut().filter(|slice| slice.seat.is_none()) {
                slice.seat = open(slice.gpu);
                self.on.extend(slice.seat.map(|seat| (seat, slice.id)));
            }
            self.update_indexes(index);
        }
    }

    /// Returns the functions that have a waiting request and a slice with a seat.
    pub(super) fn ready(&self) -> impl Iterator<Item = &SlicedFunction> {
        self.ready.iter().filter_map(|index| self.functions.get(index))
    }

    /// Returns the GPUs with slices for a model.
    pub(super) fn gpus_of(&self, model: ModelId) -> BTreeSet<GpuIndex> {
        let first = (model, FunctionIndex(0));
        let last = (model, FunctionIndex(u32::MAX));
        let functions = self.of_model.range(first..=last).filter_map(|(_, index)| self.functions.get(index));
        functions.flat_map(|function| &function.slices).map(|slice| slice.gpu).collect()
    }

    pub(super) fn slice_on(&self, seat: SeatIndex) -> Option<SliceId> {
        self.on.get(&seat).copied()
    }

    fn update_indexes(&mut self, index: FunctionIndex) {
        let function = self.functions.get(&index);
        let has_seat = |it: &SlicedFunction| it.slices.iter().any(|slice| slice.seat.is_some());
        let lacks_seat = |it: &SlicedFunction| it.slices.iter().any(|slice| slice.seat.is_none());
        let ready = function.is_some_and(|it| !it.waiting.is_empty() && has_seat(it));
        for (set, belongs) in
            [(&mut self.ready, ready), (&mut self.seatless, function.is_some_and(lacks_seat))]
        {
            if belongs {
                set.insert(index);
            } else {
                set.remove(&index);
            }
        }
    }
}
