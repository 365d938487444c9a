//! The restart of actors that panicked.

use std::rc::Rc;

use millrace_gpu::Event as GpuEvent;
use millrace_types::Reason;

use super::{ActorId, Supervisor};
use crate::messages::{executor, function, gpu, node};

impl Supervisor {
    /// Restarts an actor, and tells the other actors about the state that was lost.
    pub(super) fn panicked(self: &Rc<Self>, who: ActorId, message: &str) {
        let epoch = match who {
            ActorId::Node => self.state.node.epoch(),
            ActorId::Gpu(gpu) => self.state.gpu(gpu).epoch(),
            ActorId::Executor(gpu) => self.state.executor(gpu).epoch(),
            ActorId::Link(link) => self.state.link(link).epoch(),
        };
        tracing::error!(?who, epoch, message, "an actor panicked and is restarted");
        match who {
            ActorId::Node => self.node_panicked(),
            ActorId::Gpu(gpu) => {
                self.start_gpu(gpu);
                self.state.executor(gpu).post(executor::Message::Replace);
                self.state.node.post(node::Message::GpuReset(gpu));
            }
            ActorId::Executor(gpu) => {
                self.start_executor(gpu);
                self.state.gpu(gpu).post(gpu::Message::Event(GpuEvent::Down));
            }
            ActorId::Link(link) => self.start_link(link),
        }
    }

    fn node_panicked(self: &Rc<Self>) {
        self.start_node();
        for hosted in self.state.registry.borrow().functions().filter(|hosted| hosted.program.is_none()) {
            hosted.slot.post(function::Message::NodeLost(Reason::Internal));
        }
        self.state.links.keys().for_each(|&link| self.start_link(link));
        for gpu in self.state.gpu_indices() {
            self.state.residence().lost(self.state.clock.now(), gpu);
            // Handles of the old actor's objects keep the old actor alive, so the old actor has to mark
            // its data as lost.
            self.state.gpu(gpu).post(gpu::Message::ActorReplaced);
            self.start_gpu(gpu);
            self.state.executor(gpu).post(executor::Message::Replace);
        }
    }
}
