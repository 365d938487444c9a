//! The functions of a node: installation, the start of actors, settings for dispatch and GPUs, and removal.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::attempts::Idempotence;
use millrace_core::ids::FunctionIndex;
use millrace_core::trace::CoreId;
use millrace_gpu::Event as GpuEvent;
use millrace_memory::elastic;
use millrace_scheduling::admission::{self, Admission};
use millrace_scheduling::batching;
use millrace_scheduling::dispatch::LatencyObjective;
use millrace_types::{Bytes, ModelId, ResidencyOptions, RevisionKey};

use super::{ActorId, Removed, Supervisor};
use crate::actors::function::{self, FunctionActor, RunBackend, SloCountReports};
use crate::actors::gpu;
use crate::clock::Sleeper;
use crate::handle::FunctionEntry;
use crate::install::{FunctionConfig, InstallError, PreparedModel};
use crate::programs::HostedProgram;
use crate::programs::pool::{self, ProcessPoolActor};

impl Supervisor {
    /// Registers a function and starts its actor. Returns the function's model and its memory if the
    /// model is new on this node.
    pub(crate) fn install(
        self: &Rc<Self>,
        config: FunctionConfig,
        prepared: &Arc<PreparedModel>,
    ) -> Result<Option<(ModelId, Bytes)>, InstallError> {
        let largest = self.config.topology.gpus.iter().map(|gpu| gpu.memory).max().unwrap_or(Bytes::ZERO);
        let function = config.key.function.clone();
        let added = self.registry.borrow_mut().add(config, prepared, largest)?;
        let Some(added) = added else { return Ok(None) };
        self.residence().hosted(self.clock.now(), added.function, &function);
        let Some((model, memory)) = added.new_model else {
            self.start_function(added.function);
            return Ok(None);
        };
        for gpu in &self.gpus {
            gpu.post(gpu::Message::Install { model, memory, prepared: Arc::clone(prepared) });
        }
        self.start_function(added.function);
        Ok(Some((model, memory)))
    }

    /// Registers a function that is a program, and starts its actors. Does nothing for a revision that is
    /// registered already.
    pub(crate) fn host(self: &Rc<Self>, config: FunctionConfig, program: Arc<HostedProgram>, processes: u32) {
        let added = self.registry.borrow_mut().add_program(config, program, processes);
        if let Some(function) = added {
            self.start_crew(function);
            self.start_function(function);
        }
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
            hosting.crew.post(pool::Message::Stop);
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

    pub(super) fn start_function(self: &Rc<Self>, index: FunctionIndex) {
        let registry = self.registry.borrow();
        let Some(hosted) = registry.function(index) else { return };
        let FunctionConfig { key, slo, idempotent, serving, .. } = hosted.config.clone();
        let config = admission::Config {
            in_flight_max: self.config.in_flight_max,
            deadline: slo.map(|slo| slo.deadline),
            idempotent: if idempotent { Idempotence::Yes } else { Idempotence::No },
        };
        let core = self.drive(Admission::new(config), CoreId::Admission(index));
        // The queue of a process pool does not depend on SLO counts, so programs never report SLO counts.
        let (told, below) = match &hosted.program {
            None => (Rc::clone(&self.told), RunBackend::Gpus),
            Some(hosting) => {
                (Rc::new(Cell::new(SloCountReports::No)), RunBackend::ProcessPool(hosting.crew.clone()))
            }
        };
        let score = Rc::clone(&hosted.score);
        let actor = FunctionActor::new(index, key.clone(), core, score, told, self.node.clone(), below);
        let sleeper = Sleeper::core(CoreId::Admission(index));
        let mailbox = self.spawn(actor, ActorId::Function(index), sleeper);
        hosted.slot.publish(mailbox.clone());
        if registry.index_of(&key) == Some(index) {
            let entry = FunctionEntry {
                index,
                model: hosted.model,
                priority: serving.priority,
                idempotent,
                deadline: slo.map(|slo| slo.deadline),
                mailbox,
            };
            self.directory.publish_function(key, entry);
        } else {
            // The function was retiring when its actor was restarted.
            hosted.slot.post(function::Message::Retire);
        }
    }

    pub(super) fn start_crew(self: &Rc<Self>, index: FunctionIndex) {
        let registry = self.registry.borrow();
        let Some((hosted, hosting)) =
            registry.function(index).and_then(|it| Some((it, it.program.as_ref()?)))
        else {
            return;
        };
        let program = Arc::clone(&hosting.program);
        let crew = &hosting.crew;
        let seed = self.seed ^ u64::from(index.0);
        let actor = ProcessPoolActor::new(&hosted.config, program, hosting.processes, seed, crew.clone());
        crew.publish(self.spawn(actor, ActorId::ProcessPool(index), Sleeper::NODE));
        crew.post(pool::Message::Start);
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
