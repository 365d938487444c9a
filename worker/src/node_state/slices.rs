//! The slices of the node's GPUs.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_core::ids::FunctionIndex;
use millrace_scheduling::dispatch;
use millrace_types::{GpuIndex, ModelId, RevisionKey, SliceCompute, SliceId};

use super::state::NodeState;
use crate::desired_state::{NodeSlices, PlacedSlices};

impl NodeState {
    /// Sets the slices that the leader wants.
    pub(crate) fn want_slices(&self, wanted: Arc<NodeSlices>) {
        *self.wanted_slices.borrow_mut() = wanted;
    }

    /// Returns the slices in force: none unless GPUs are shared.
    pub(crate) fn slices(&self) -> Arc<NodeSlices> {
        match self.config.sharing_of(&self.policy()) {
            Some(_) => Arc::clone(&self.wanted_slices.borrow()),
            None => Arc::default(),
        }
    }

    /// Returns the slices in force on a GPU.
    pub(crate) fn slices_on(&self, gpu: GpuIndex) -> BTreeMap<SliceId, SliceCompute> {
        slices_on(&self.slices(), gpu)
    }

    /// Returns the event that tells dispatch the slices in force of a function; `None` for a function that
    /// is not installed, or is a program.
    pub(crate) fn slices_of(&self, key: &RevisionKey) -> Option<dispatch::Event> {
        let registry = self.registry.borrow();
        let function = registry.index_of(key)?;
        let hosted = registry.function(function).filter(|hosted| hosted.program.is_none())?;
        let slices = self
            .slices()
            .get(key)
            .map(|placed| placed.on.iter().map(|slice| (slice.id, slice.gpu)).collect());
        Some(dispatch::Event::SlicesChanged { function, model: hosted.model, slices })
    }

    /// Returns the model of a function with slices.
    pub(crate) fn sliced_model(&self, function: FunctionIndex) -> Option<ModelId> {
        let registry = self.registry.borrow();
        let hosted = registry.function(function)?;
        self.slices().contains_key(&hosted.config.key).then_some(hosted.model)
    }

    /// Returns the events for all functions with slices.
    pub(crate) fn all_slices(&self) -> Vec<dispatch::Event> {
        self.slices().keys().filter_map(|key| self.slices_of(key)).collect()
    }
}

/// Returns the slices on a GPU.
pub(crate) fn slices_on(slices: &NodeSlices, gpu: GpuIndex) -> BTreeMap<SliceId, SliceCompute> {
    let of_function = |placed: &PlacedSlices| {
        let terms = placed.terms;
        let here = placed.on.iter().filter(move |slice| slice.gpu == gpu);
        here.map(move |slice| (slice.id, SliceCompute { terms, curve: slice.curve })).collect::<Vec<_>>()
    };
    slices.values().flat_map(of_function).collect()
}
