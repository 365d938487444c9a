//! The orders in which opaque programs are copied: an executor's record of how one reads becomes the order
//! of its next swap, on every GPU of the node.

use std::sync::Arc;

use millrace_policy::ids::RunId;
use millrace_proto::executor::ByteRange;
use millrace_types::ModelId;

use super::Gpu;
use crate::actors::{executor, node};
use crate::copy_order::CopyOrder;

impl Gpu {
    /// The executor recorded an order in this run, if `told` is not empty. Said before the run is over
    /// for the core: what follows from that may be a swap.
    pub(super) fn recorded(&mut self, run: RunId, told: &[ByteRange]) {
        if told.is_empty() {
            return;
        }
        let Some(model) = self.core.core.model_of(run) else { return };
        let Some(order) = CopyOrder::new(told, self.weights(model)) else {
            let gpu = self.index().0;
            return tracing::error!(
                gpu,
                program = model.0,
                "an order of copies without some bytes is not used"
            );
        };
        let order = Arc::new(order);
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
