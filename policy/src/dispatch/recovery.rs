//! Models whose GPU was lost (T16): those that requests wait for are brought to other GPUs at once,
//! by swap from the host, without waiting for a GPU to be free for a run. So they are there, or on
//! their way, long before an executor is back.
//!
//! Each goes to the GPU with most room beside what requests wait for there; where none has enough,
//! it comes in its turn, as any other.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::models::Slot;
use super::{Action, Dispatch};

impl Dispatch {
    pub(super) fn bring_homeless(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let homeless: Vec<_> = self.models.homeless().collect();
        let room = |index: GpuIndex| {
            let gpu = self.fleet.get(index);
            (index, u64::from(self.sizes[gpu.rank.0]).saturating_sub(gpu.wanted_blocks(&self.models)))
        };
        let mut room: BTreeMap<GpuIndex, u64> = self.fleet.up().map(room).collect();
        for slot in homeless {
            let blocks = self.models.get(slot).blocks;
            let fits = room.iter_mut().filter(|(_, room)| **room >= u64::from(blocks));
            let Some((&gpu, left)) = fits.min_by_key(|(gpu, room)| (Reverse(**room), **gpu)) else {
                continue;
            };
            *left -= u64::from(blocks);
            self.prefetch(now, slot, gpu, actions);
        }
    }

    /// Has a GPU bring a model, without a request for it.
    pub(super) fn prefetch(&mut self, now: Timestamp, slot: Slot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let model = self.comes_without_request(now, slot, gpu, actions);
        actions.push(Action::Prefetch { gpu, model });
    }

    /// Notes that a model comes to a GPU.
    pub(super) fn comes_without_request(
        &mut self,
        now: Timestamp,
        slot: Slot,
        gpu: GpuIndex,
        actions: &mut Vec<Action>,
    ) -> ModelId {
        let model = self.models.get(slot);
        let (id, blocks) = (model.id, model.blocks);
        self.models.held_by(slot, gpu);
        self.fleet.change(gpu, |it| it.add_resident(now, slot, blocks));
        self.tell_standing(slot, gpu, actions);
        id
    }
}
