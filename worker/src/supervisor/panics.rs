//! The restart of actors that panicked.

use std::rc::Rc;

use millrace_policy::gpu::Event as GpuEvent;
use millrace_types::Reason;

use super::{Supervisor, Who};
use crate::actors::{executor, function, gpu, node};
use crate::programs::crew;

impl Supervisor {
    /// Restarts an actor, and tells the other actors about the state that was lost.
    pub(super) fn panicked(self: &Rc<Self>, who: Who, message: &str) {
        let epoch = match who {
            Who::Node => self.node.epoch(),
            Who::Function(index) => {
                self.registry.borrow().function(index).map_or(0, |hosted| hosted.slot.epoch())
            }
            Who::Crew(index) => {
                let registry = self.registry.borrow();
                let hosting = registry.function(index).and_then(|hosted| hosted.program.as_ref());
                hosting.map_or(0, |hosting| hosting.crew.epoch())
            }
            Who::Gpu(gpu) => self.gpu(gpu).epoch(),
            Who::Executor(gpu) => self.executor(gpu).epoch(),
            Who::Link(link) => self.link(link).epoch(),
        };
        tracing::error!(?who, epoch, message, "an actor panicked and is restarted");
        match who {
            Who::Node => self.node_panicked(),
            Who::Function(index) => {
                self.start_function(index);
                let registry = self.registry.borrow();
                match registry.function(index).and_then(|hosted| hosted.program.as_ref()) {
                    Some(hosting) => hosting.crew.post(crew::Message::FunctionReset),
                    None => self.node.post(node::Message::FunctionReset(index)),
                }
            }
            Who::Crew(index) => {
                self.start_crew(index);
                if let Some(hosted) = self.registry.borrow().function(index) {
                    hosted.slot.post(function::Message::NodeLost(Reason::Internal));
                }
            }
            Who::Gpu(gpu) => {
                self.start_gpu(gpu);
                self.executor(gpu).post(executor::Message::Replace);
                self.node.post(node::Message::GpuReset(gpu));
            }
            Who::Executor(gpu) => {
                self.start_executor(gpu);
                self.gpu(gpu).post(gpu::Message::Event(GpuEvent::Down));
            }
            Who::Link(link) => self.start_link(link),
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
            self.gpu(gpu).post(gpu::Message::Replaced);
            self.start_gpu(gpu);
            self.executor(gpu).post(executor::Message::Replace);
        }
    }
}
