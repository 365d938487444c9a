//! The orders in which opaque programs are copied: what executors recorded of how one reads becomes the order
//! of its next swap, on every GPU of the node. What one recorded is put together with what is known: an
//! executor that is new to a program has seen it read one way, and others have seen it read others.

use std::sync::Arc;

use millrace_policy::ids::RunId;
use millrace_proto::executor::LaunchReads;
use millrace_types::ModelId;

use super::Gpu;
use crate::actors::{executor, node};
use crate::copy_order::CopyOrder;

impl Gpu {
    /// The executor recorded in this run what launches read first, if `told` is not empty. Said before the run
    /// is over for the core: what follows from that may be a swap.
    pub(super) fn recorded(&mut self, run: RunId, told: &[LaunchReads]) {
        if told.is_empty() {
            return;
        }
        let Some(model) = self.core.core.model_of(run) else { return };
        let of = |block| CopyOrder::new(told, self.weights(model), block);
        let Some(order) = self.models.get(&model).and_then(|it| it.opaque_block).and_then(of) else {
            let gpu = self.index().0;
            return tracing::error!(gpu, program = model.0, "reads that a program cannot have are not used");
        };
        let order = Arc::new(match self.orders.get(&model) {
            Some(known) => order.after(known),
            None => order,
        });
        self.orders.insert(model, Arc::clone(&order));
        self.peers.node.post(node::Message::Recorded { model, order });
    }

    /// Tells the executor's actor in which order the mapping that begins is filled.
    pub(super) fn tell_order(&self, model: ModelId) {
        if self.is_opaque(model) {
            let (incarnation, order) = (self.incarnation, self.orders.get(&model).cloned());
            self.peers.executor.post(executor::Message::CopyOrder { incarnation, model, order });
        }
    }

    /// Whether the reads of a model's launches are not known before they are issued.
    pub(super) fn is_opaque(&self, model: ModelId) -> bool {
        self.models.get(&model).is_some_and(|model| model.opaque_block.is_some())
    }
}
