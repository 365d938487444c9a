//! The functions of a node: registration, settings for dispatch and GPUs, and removal.

use std::sync::Arc;
use std::time::Duration;

use millrace_core::ids::FunctionIndex;
use millrace_gpu::Event as GpuEvent;
use millrace_memory::elastic;
use millrace_scheduling::batching;
use millrace_scheduling::dispatch::LatencyObjective;
use millrace_types::{Bytes, ModelId, ResidencyOptions, RevisionKey};

use super::state::NodeState;
use crate::install::{FunctionConfig, InstallError, PreparedModel};
use crate::messages::{function, gpu, process_pool};
use crate::registry::{Added, Removed};

impl NodeState {
    /// Registers a function, and installs its model on the GPUs if the model is new on this node. Returns
    /// `None` for a revision that is registered already.
    pub(crate) fn register(
        &self,
        config: FunctionConfig,
        prepared: &Arc<PreparedModel>,
    ) -> Result<Option<Added>, InstallError> {
        let largest = self.config.topology.gpus.iter().map(|gpu| gpu.memory).max().unwrap_or(Bytes::ZERO);
        let function = config.key.function.clone();
        let added = self.registry.borrow_mut().add(config, prepared, largest)?;
        let Some(added) = added else { return Ok(None) };
        self.residence().hosted(self.clock.now(), added.function, &function);
        if let Some((model, memory)) = added.new_model {
            for gpu in &self.gpus {
                gpu.post(gpu::Message::Install { model, memory, prepared: Arc::clone(prepared) });
            }
        }
        Ok(Some(added))
    }

    /// Returns a model's residency if the functions that use the model changed the residency, and passes
    /// the residency to the GPUs.
    pub(crate) fn new_residency(&self, model: ModelId) -> Option<ResidencyOptions> {
        let residency = self.registry.borrow_mut().new_residency(model)?;
        for gpu in &self.gpus {
            gpu.post(gpu::Message::Event(GpuEvent::Residency { model, residency }));
        }
        Some(residency)
    }

    /// Stops accepting requests for a function. The function is removed once it has answered its last
    /// request.
    pub(crate) fn retire(&self, key: &RevisionKey) {
        self.directory.withdraw_function(key);
        if let Some((index, slot)) = self.registry.borrow_mut().retire(key) {
            self.residence().retired(self.clock.now(), index);
            slot.post(function::Message::Retire);
        }
    }

    /// Removes a function that has answered its last request, and its model if no other function uses the
    /// model.
    pub(crate) fn remove(&self, function: FunctionIndex) -> Option<Removed> {
        if let Some(hosting) = self.registry.borrow().function(function).and_then(|it| it.program.as_ref()) {
            hosting.pool.post(process_pool::Message::Stop);
        }
        let removed = self.registry.borrow_mut().remove(function)?;
        self.residence().removed(self.clock.now(), function);
        for gpu in &self.gpus {
            let forget = elastic::Event::Forget { function };
            gpu.post(gpu::Message::Event(GpuEvent::Data(forget)));
        }
        if let Removed::WithModel(model) = removed {
            self.gpus.iter().for_each(|gpu| gpu.post(gpu::Message::Remove(model)));
        }
        Some(removed)
    }

    /// Whether dispatch depends on the SLO counts of functions.
    pub(crate) fn wants_scores(&self) -> bool {
        self.policy().dispatch.uses_scores()
    }

    /// Returns the batching limits of a function with batched requests.
    pub(crate) fn limits_of(&self, key: &RevisionKey) -> Option<batching::Event> {
        let registry = self.registry.borrow();
        let index = registry.index_of(key)?;
        self.limits(index, &registry.function(index)?.config)
    }

    /// Returns a function's index and objective.
    pub(crate) fn objective_of(
        &self,
        key: &RevisionKey,
    ) -> Option<(FunctionIndex, Option<LatencyObjective>)> {
        let registry = self.registry.borrow();
        let index = registry.index_of(key)?;
        Some((index, self.objective(&registry.function(index)?.config)))
    }

    /// Returns the time within which a function's requests have to be answered, from the SLO.
    pub(crate) fn deadline_of(&self, function: FunctionIndex) -> Option<Duration> {
        self.registry.borrow().function(function)?.config.slo.map(|slo| slo.deadline)
    }

    /// Returns the deadline of a revision that accepts requests, from the SLO.
    pub(crate) fn deadline_of_revision(&self, key: &RevisionKey) -> Option<Duration> {
        let function = self.registry.borrow().index_of(key)?;
        self.deadline_of(function)
    }

    pub(crate) fn model_of(&self, key: &RevisionKey) -> Option<ModelId> {
        let registry = self.registry.borrow();
        Some(registry.function(registry.index_of(key)?)?.model)
    }
}

pub(super) fn limits(function: FunctionIndex, config: &FunctionConfig) -> Option<batching::Event> {
    let deadline = config.slo.map(|slo| slo.deadline);
    let batching = config.serving.batching;
    batching.map(|batching| batching::Event::Limits { function, batching: Some(batching), deadline })
}
