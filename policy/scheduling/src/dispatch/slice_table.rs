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

/// The functions with slices of a node.
#[derive(Debug, Default)]
pub(super) struct SlicedFunctions(pub(super) BTreeMap<FunctionIndex, SlicedFunction>);

impl SlicedFunctions {
    /// Returns whether a request waits for, or belongs on, the seat of a slice.
    pub(super) fn has(&self, request: &WaitingRequest) -> bool {
        !request.attempts.suspect() && self.0.contains_key(&request.function)
    }

    pub(super) fn push(&mut self, request: &WaitingRequest) {
        if let Some(function) = self.0.get_mut(&request.function) {
            function.waiting.insert((request.priority, request.key));
        }
    }

    /// Removes a waiting request. Returns whether the request waited here.
    pub(super) fn remove(&mut self, request: &WaitingRequest) -> bool {
        let function = self.0.get_mut(&request.function);
        function.is_some_and(|function| function.waiting.remove(&(request.priority, request.key)))
    }

    /// Returns the GPUs with slices for a model.
    pub(super) fn gpus_of(&self, model: ModelId) -> BTreeSet<GpuIndex> {
        let functions = self.0.values().filter(|function| function.model == model);
        functions.flat_map(|function| &function.slices).map(|slice| slice.gpu).collect()
    }

    pub(super) fn slice_on(&self, seat: SeatIndex) -> Option<SliceId> {
        let mut slices = self.0.values().flat_map(|function| &function.slices);
        slices.find(|slice| slice.seat == Some(seat)).map(|slice| slice.id)
    }
}
