//! The restart of actors that panicked.

use std::rc::Rc;

use millrace_gpu::Event as GpuEvent;
use millrace_types::Reason;

use super::{ActorId, Supervisor};
use crate::actors::{executor, function, gpu, node};
use crate::programs::pool;

impl Supervisor {
    /// Restarts an actor, and tells the other actors about the state that was lost.
    pub(super) fn panicked(self: &Rc<Self>, who: ActorId, message: &str) {
        let epoch = match who {
            ActorId::Node => self.node.epoch(),
            ActorId::Function(index) => {
                self.registry.borrow().function(index).map_or(0, |hosted| hosted.slot.epoch())
            }
            ActorId::ProcessPool(index) => {
                let registry = self.registry.borrow();
                let hosting = registry.function(index).and_then(|hosted| hosted.program.as_ref());
                hosting.map_or(0, |hosting| hosting.crew.epoch())
            }
            ActorId::Gpu(gpu) => self.gpu(gpu).epoch(),
            ActorId::Executor(gpu) => self.executor(gpu).epoch(),
            ActorId::Link(link) => self.link(link).epoch(),
        };
        tracing::error!(?who, epoch, message, "an actor panicked and is restarted");
        match who {
            ActorId::Node => self.node_panicked(),
            ActorId::Function(index) => {
                self.start_function(index);
                let registry = self.registry.borrow();
                match registry.function(index).and_then(|hosted| hosted.program.as_ref()) {
                    Some(hosting) => hosting.crew.post(pool::Message::FunctionReset),
                    None => self.node.post(node::Message::FunctionReset(index)),
                }
            }
            ActorId::ProcessPool(index) => {
                self.start_crew(index);
                if let Some(hosted) = self.registry.borrow().function(index) {
                    hosted.slot.post(function::Message::NodeLost(Reason::Internal));
                }
            }
            ActorId::Gpu(gpu) => {
                self.start_gpu(gpu);
                self.executor(gpu).post(executor::Message::Replace);
                self.node.post(node::Message::GpuReset(gpu));
            }
            ActorId::Executor(gpu) => {
                self.start_executor(gpu);
                self.gpu(gpu).post(gpu::Message::Event(GpuEvent::Down));
            }
            ActorId::Link(link) => self.start_link(link),
        }
    }

    fn node_panicked(self: &Rc<Self>) {
        self.start_node();
        for hosted in self.registry.borrow().functions().filter(|hosted| hosted.program.is_none()) {
            hosted.slot.post(function::Message::NodeLost(Reason::Internal));
        }
        self.links.keys().for_each(|&link| self.start_link(link));
        for gpu in self.gpu_indices() {
            self.residence().lost(self.clock.now(), gpu);
            // Handles of the old actor's objects keep the old actor alive, so the old actor has to mark
            // its data as lost.
            self.gpu(gpu).post(gpu::Message::ActorReplaced);
            self.start_gpu(gpu);
            self.executor(gpu).post(executor::Message::Replace);
        }
    }
}
