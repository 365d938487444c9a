//! The processes of single models, if each model has a process ([`isolation`](super::isolation)):
//! their loss, their number, and the requests that wait for a new process.
//!
//! The end of a process takes the model off the GPU and hands back the model's requests, each with
//! the request's progress. The rules of [`attempts`](millrace_core::attempts) hold as for a whole
//! executor, and everything else on the GPU continues. The blocks of the process are free at once,
//! because only the process's own copies write there. Blocks that another GPU is copying stay taken
//! until that GPU has learned of the loss. A model with processes that keep dying waits longer each
//! time, and requests for other models go first.

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::executor::HANG_AFTER;
use super::gpu_core::GpuCore;
use super::isolation::PROCESSES_MAX;
use super::programs::ProgramLoadState;
use super::protocol::Action;
use super::slots::{AssignedRequest, RequestStage};
use millrace_core::attempts::{AttemptProgress, ReturnReason};
use millrace_core::ids::RequestKey;
use millrace_memory::{EvictedModel, MemoryShortage};

/// Returns a backoff seed that differs between models and GPUs, so that restarts are spread out.
pub(super) fn seed(gpu: GpuIndex, model: ModelId) -> u64 {
    (u64::from(gpu.0) << 32 | u64::from(model.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl GpuCore {
    /// Handles the end of a model's process and the loss of the process's memory.
    pub(super) fn program_lost(&mut self, now: Timestamp, model: ModelId, actions: &mut Vec<Action>) {
        // The process was told to end, so its end changes nothing.
        if self.programs.known(model) == ProgramLoadState::No {
            return;
        }
        let lost = self.progress_of(|slot| slot.model == model);
        self.programs.died(now, model, seed(self.index, model));
        self.prefetched.remove(&model);
        self.cancel_transfers(|moving| moving.model == model, actions);
        self.lose_region(model, actions);
        actions.push(Action::Evicted { models: vec![model] });
        for (slot, progress) in lost {
            self.lose_request(slot.key, progress, actions);
        }
    }

    /// Frees the blocks of a dead process. Blocks that other GPUs copy stay taken until the last
    /// copy has stopped: otherwise a copy would read another model's bytes as this model's.
    fn lose_region(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let copied = self.lent.iter().filter(|&(_, &lent)| lent == model).map(|(&transfer, _)| transfer);
        let copied: Vec<_> = copied.collect();
        if copied.is_empty() {
            self.memory.unmap(model);
        } else {
            self.leftovers.insert(model);
            actions.extend(copied.into_iter().map(|transfer| Action::LockLost { transfer }));
        }
    }

    fn lose_request(&mut self, key: RequestKey, progress: AttemptProgress, actions: &mut Vec<Action>) {
        let Some(place) = self.lines.place_of(key) else { return };
        let slot = self.lines.remove(place);
        actions.push(if slot.cancelled.is_some() {
            Action::Ended { key, ran: None }
        } else {
            Action::RequestReturned { key, why: ReturnReason::Died(progress) }
        });
    }

    /// Whether a model has to wait even if there is room: its last process died recently, or
    /// another GPU still copies the blocks of that process.
    pub(super) fn must_wait(&self, now: Timestamp, model: ModelId) -> bool {
        self.leftovers.contains(&model) || self.programs.starts(model) > now
    }

    /// Moves requests behind the others of their seat if their model has to wait.
    pub(super) fn reorder_waiting(&mut self, now: Timestamp) {
        if !self.isolation.per_model() {
            return;
        }
        let starts = |model| Some(self.programs.starts(model)).filter(|&at| at > now);
        let waiting =
            self.lines.iter().filter(|slot| slot.stage == RequestStage::Waiting).map(|slot| slot.model);
        let look_again = waiting.chain(self.prefetched.keys().copied()).filter_map(starts).min();
        let waits =
            |slot: &AssignedRequest| slot.stage == RequestStage::Waiting && self.must_wait(now, slot.model);
        let waits: Vec<bool> = self.lines.iter().map(waits).collect();
        self.lines.set_back(&waits);
        self.look_again = look_again;
    }

    /// Ends a process if there are already [`PROCESSES_MAX`], before another is started. The
    /// processes of the models in `spared` are kept.
    pub(super) fn end_surplus_process(
        &mut self,
        spared: &[ModelId],
        actions: &mut Vec<Action>,
    ) -> Result<(), MemoryShortage> {
        let idle = |model| self.memory.region(model).is_none() && !self.lines.uses(model);
        let may_go = |model| !spared.contains(&model) && !self.is_lent(model);
        let surplus = self.programs.surplus(PROCESSES_MAX, idle);
        let Some(model) = surplus.or_else(|| self.programs.surplus(PROCESSES_MAX, may_go)) else {
            let full = self.programs.known_count() >= PROCESSES_MAX;
            return if full { Err(MemoryShortage::Pinned) } else { Ok(()) };
        };
        if let Some(EvictedModel { model, generation }) = self.memory.unmap(model) {
            self.prefetched.remove(&model);
            self.totals.evictions += 1;
            actions.push(Action::Unmap { model, generation });
            if !self.lines.uses(model) {
                actions.push(Action::Evicted { models: vec![model] });
            }
        }
        self.unload(model, actions);
        Ok(())
    }

    /// Has the executor unload a model.
    pub(super) fn unload(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if self.programs.known(model) != ProgramLoadState::No {
            self.programs.forget(model);
            actions.push(Action::UnloadProgram { model });
        }
    }

    pub(super) fn is_lent(&self, model: ModelId) -> bool {
        self.lent.values().any(|&lent| lent == model)
    }

    /// Ends the processes of cancelled runs that do not end. The end of such a process is reported
    /// like that of any process.
    pub(super) fn end_hung(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for slot in self.lines.iter_mut().filter(|slot| slot.run().is_some()) {
            if slot.cancelled.is_some_and(|since| since + HANG_AFTER <= now) {
                slot.cancelled = Some(now);
                actions.push(Action::EndProgram { model: slot.model });
            }
        }
    }
}
