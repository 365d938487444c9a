//! Models that other GPUs copy from this GPU over a direct link (T22, T25). A locked model is not
//! evicted, so that no copy reads blocks that have another owner by then. A lock is refused if the
//! model is not complete here, or if a request here waits for room.

use millrace_types::{Bytes, ModelId};

use super::gpu_core::GpuCore;
use super::preparation::first_blocks;
use super::protocol::Action;
use super::slots::RequestStage;
use millrace_core::ids::TransferId;
use millrace_transfers::fabric::PeerBlocks;

impl GpuCore {
    pub(super) fn lock(&mut self, transfer: TransferId, model: ModelId, actions: &mut Vec<Action>) {
        let peer = self.try_lock(model);
        actions.push(match peer {
            Some(peer) => {
                self.lent.insert(transfer, model);
                Action::Locked { transfer, peer }
            }
            None => Action::NotLocked { transfer },
        });
    }

    fn try_lock(&mut self, model: ModelId) -> Option<PeerBlocks> {
        let incarnation = self.incarnation?;
        let shape = self.programs.shape(model)?;
        // Without this check, a model that is copied again and again could keep a request here from
        // ever getting room.
        let waits_for_room = self.lines.iter().any(|slot| slot.stage == RequestStage::Waiting);
        if waits_for_room || !self.complete(model) {
            return None;
        }
        let region = self.memory.lock(model)?;
        let blocks = first_blocks(region.runs(), shape.weight_blocks);
        let block = self.memory.block();
        Some(PeerBlocks { gpu: self.index, incarnation, blocks, block, skip: Bytes::ZERO })
    }

    pub(super) fn unlock(&mut self, transfer: TransferId) {
        // The lock of a lost executor was dropped with the executor.
        if let Some(model) = self.lent.remove(&transfer) {
            self.memory.unlock(model);
            if !self.is_lent(model) && self.leftovers.remove(&model) {
                self.memory.unmap(model);
            }
        }
    }
}
