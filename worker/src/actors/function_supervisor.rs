//! The start of Function actors and of the process pools of programs, and their restart after a panic.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use millrace_core::attempts::Idempotence;
use millrace_core::ids::FunctionIndex;
use millrace_core::trace::CoreId;
use millrace_scheduling::admission::{self, Admission};
use millrace_types::{Bytes, ModelId, Reason};

use super::function::{FunctionActor, RunBackend};
use super::process_pool::ProcessPoolActor;
use crate::actor_runtime::{self, ActorBehaviour, Mailbox, StartedActor};
use crate::clock::Sleeper;
use crate::handle::FunctionEntry;
use crate::install::{FunctionConfig, InstallError, PreparedModel};
use crate::messages::{function, node, process_pool};
use crate::node_state::{NodeState, SloCountReports};
use crate::programs::HostedProgram;

/// The identity of an actor.
#[derive(Debug, Clone, Copy)]
enum ActorId {
    Function(FunctionIndex),
    ProcessPool(FunctionIndex),
}

/// The supervisor of the actors of functions. Clones share the node's state.
#[derive(Clone)]
pub(crate) struct FunctionSupervisor(Rc<NodeState>);

impl FunctionSupervisor {
    pub(crate) fn new(state: Rc<NodeState>) -> Self {
        Self(state)
    }

    /// Registers a function and starts its actor. Returns the function's model and its memory if the
    /// model is new on this node.
    pub(crate) fn install(
        &self,
        config: FunctionConfig,
        prepared: &Arc<PreparedModel>,
    ) -> Result<Option<(ModelId, Bytes)>, InstallError> {
        let Some(added) = self.0.register(config, prepared)? else { return Ok(None) };
        self.start_function(added.function);
        Ok(added.new_model)
    }

    /// Registers a function that is a program, and starts its actors. Does nothing for a revision that is
    /// registered already.
    pub(crate) fn host(&self, config: FunctionConfig, program: Arc<HostedProgram>, processes: u32) {
        let added = self.0.registry.borrow_mut().add_program(config, program, processes);
        if let Some(function) = added {
            self.start_pool(function);
            self.start_function(function);
        }
    }

    fn spawn<B: ActorBehaviour>(&self, behaviour: B, who: ActorId, sleeper: Sleeper) -> StartedActor<B> {
        let supervisor = self.clone();
        let panicked = move |message: String| supervisor.panicked(who, &message);
        actor_runtime::spawn(behaviour, Arc::clone(&self.0.clock), sleeper, panicked)
    }

    fn start_function(&self, index: FunctionIndex) {
        let state = &self.0;
        let registry = state.registry.borrow();
        let Some(hosted) = registry.function(index) else { return };
        let FunctionConfig { key, slo, idempotent, serving, .. } = hosted.config.clone();
        let config = admission::Config {
            in_flight_max: state.config.in_flight_max,
            deadline: slo.map(|slo| slo.deadline),
            idempotent: if idempotent { Idempotence::Yes } else { Idempotence::No },
        };
        let core = state.drive(Admission::new(config), CoreId::Admission(index));
        // The queue of a process pool does not depend on SLO counts, so programs never report SLO counts.
        let (told, below) = match &hosted.program {
            None => (Rc::clone(&state.slo_reports), RunBackend::Gpus),
            Some(hosting) => {
                (Rc::new(Cell::new(SloCountReports::No)), RunBackend::ProcessPool(hosting.pool.clone()))
            }
        };
        let score = Rc::clone(&hosted.score);
        let actor = FunctionActor::new(index, key.clone(), core, score, told, state.node.clone(), below);
        let sleeper = Sleeper::core(CoreId::Admission(index));
        let started = self.spawn(actor, ActorId::Function(index), sleeper);
        let mailbox = started.mailbox();
        hosted.slot.publish(Mailbox::clone(&mailbox));
        if registry.index_of(&key) == Some(index) {
            let entry = FunctionEntry {
                index,
                model: hosted.model,
                priority: serving.priority,
                idempotent,
                deadline: slo.map(|slo| slo.deadline),
                mailbox,
                updates: started.mailbox(),
            };
            state.directory().publish_function(key, entry);
        } else {
            // The function was retiring when its actor was restarted.
            hosted.slot.post(function::Message::Retire);
        }
    }

    fn start_pool(&self, index: FunctionIndex) {
        let state = &self.0;
        let registry = state.registry.borrow();
        let Some((hosted, hosting)) =
            registry.function(index).and_then(|it| Some((it, it.program.as_ref()?)))
        else {
            return;
        };
        let program = Arc::clone(&hosting.program);
        let pool = &hosting.pool;
        let seed = state.seed ^ u64::from(index.0);
        let actor = ProcessPoolActor::new(&hosted.config, program, hosting.processes, seed, pool.clone());
        pool.publish(self.spawn(actor, ActorId::ProcessPool(index), Sleeper::NODE).mailbox());
        pool.post(process_pool::Message::Start);
    }

    /// Restarts an actor, and tells the other actors about the requests that were lost.
    fn panicked(&self, who: ActorId, message: &str) {
        let registry = &self.0.registry;
        let epoch = match who {
            ActorId::Function(index) => {
                registry.borrow().function(index).map_or(0, |hosted| hosted.slot.epoch())
            }
            ActorId::ProcessPool(index) => {
                let registry = registry.borrow();
                let hosting = registry.function(index).and_then(|hosted| hosted.program.as_ref());
                hosting.map_or(0, |hosting| hosting.pool.epoch())
            }
        };
        tracing::error!(?who, epoch, message, "an actor panicked and is restarted");
        match who {
            ActorId::Function(index) => {
                self.start_function(index);
                let registry = registry.borrow();
                match registry.function(index).and_then(|hosted| hosted.program.as_ref()) {
                    Some(hosting) => hosting.pool.post(process_pool::Message::FunctionReset),
                    None => self.0.node.post(node::Message::FunctionReset(index)),
                }
            }
            ActorId::ProcessPool(index) => {
                self.start_pool(index);
                if let Some(hosted) = registry.borrow().function(index) {
                    hosted.slot.post(function::Message::NodeLost(Reason::Internal));
                }
            }
        }
    }
}
