//! Changes of the slices of the node's GPUs.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_gpu::Event as GpuEvent;
use millrace_types::Timestamp;

use super::actor::NodeActor;
use crate::desired_state::NodeSlices;
use crate::node_state::slices_on;

impl NodeActor {
    pub(super) fn set_slices(&mut self, now: Timestamp, wanted: Arc<NodeSlices>) {
        let before = self.state.slices();
        self.state.want_slices(wanted);
        self.slices_changed(now, &before);
    }

    /// Tells the GPUs and dispatch the slices in force, as far as they differ from those before. The GPUs
    /// are told first, because the next action of dispatch may assign a request to a new slice.
    pub(super) fn slices_changed(&mut self, now: Timestamp, before: &NodeSlices) {
        let after = self.state.slices();
        for gpu in self.state.gpu_indices() {
            let slices = slices_on(&after, gpu);
            if slices != slices_on(before, gpu) {
                self.tell_gpu(gpu, GpuEvent::Slices(slices));
            }
        }
        let functions: BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let places = |slices: &NodeSlices, key| {
            let placed = slices.get(key)?;
            Some(placed.on.iter().map(|slice| (slice.id, slice.gpu)).collect::<Vec<_>>())
        };
        for key in functions {
            if places(before, key) != places(&after, key)
                && let Some(event) = self.state.slices_of(key)
            {
                self.dispatch(now, event);
            }
        }
    }
}
