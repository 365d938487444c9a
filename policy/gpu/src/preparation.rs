//! Prepares requests for their run: program, memory region, weights and turn.

use millrace_types::{Bytes, GpuIndex, ModelId, Reason, Timestamp};

use super::gpu_core::{GpuCore, IncomingTransfer, RunWorkspace};
use super::lines::LinePlace;
use super::programs::{PROGRAMS_MAX, ProgramLoadState};
use super::protocol::Action;
use super::slots::{AssignedRequest, RequestStage};
use millrace_core::ids::{Generation, RequestKey, RunId, TransferId};
use millrace_memory::{BlockRun, EvictedModel, MemoryShortage};
use millrace_transfers::fabric::WeightsCargo;

impl GpuCore {
    /// Returns the most urgent request that waits for a model's weights, of the first such requests
    /// of all seats. Its deadline is the deadline of the transfer.
    #[must_use]
    pub fn reader_of(&self, model: ModelId) -> Option<RequestKey> {
        let reads = |slot: &&AssignedRequest| {
            slot.model == model && slot.stage != RequestStage::Waiting && !slot.doomed
        };
        self.lines.most_urgent(reads).map(|slot| slot.key)
    }

    /// Moves every request on as far as possible.
    pub(super) fn advance(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if self.incarnation.is_none() {
            return;
        }
        self.reorder_waiting(now);
        if self.sharing_changes(now) {
            return self.move_weights(now, actions);
        }
        let one_at_a_time = self.runs_one_at_a_time();
        for (rank, line) in self.lines.visiting_order().enumerate() {
            if one_at_a_time && !self.is_next_alone(line) {
                continue;
            }
            self.begin_turn(now, line);
            if let Some(place) = self.send_line(now, line, actions) {
                self.make_way(rank, place, actions);
            }
        }
        self.move_weights(now, actions);
    }

    /// Whether several seats have requests although the GPU is not shared: the sharing has just ended.
    fn runs_one_at_a_time(&self) -> bool {
        self.tokens.is_none() && self.lines.heads().nth(1).is_some()
    }

    /// Whether a line is the one that runs on a GPU that is not shared, while several lines have requests. The
    /// oldest of the first requests runs, and then the next oldest.
    fn is_next_alone(&self, line: usize) -> bool {
        let key = self.lines.get(LinePlace::first_in(line)).map(|head| head.key);
        let sent = self.lines.iter().any(|slot| slot.run().is_some());
        !sent && key == self.lines.heads().map(|head| head.key).min()
    }

    /// Sends the requests of a line, up to the first that has to wait. Returns the place of that
    /// request if it waits for room.
    fn send_line(&mut self, now: Timestamp, line: usize, actions: &mut Vec<Action>) -> Option<LinePlace> {
        let alone = self.runs_one_at_a_time();
        let mut place = LinePlace::first_in(line);
        let mut before = None;
        while let Some(&slot) = self.lines.get(place) {
            let before = before.replace(slot.right);
            match slot.stage {
                RequestStage::Sent { .. } => {}
                RequestStage::Starved => return None,
                RequestStage::Waiting if self.must_wait(now, slot.model) => return None,
                RequestStage::Waiting if alone && !place.is_first() => return None,
                // The runs of a seat use the same tokens.
                RequestStage::Waiting
                    if self.tokens.is_some() && before.is_some_and(|right| right != slot.right) =>
                {
                    return None;
                }
                RequestStage::Waiting => match self.send(now, place, slot, actions) {
                    Ok(()) => {}
                    Err(MemoryShortage::Pinned) => return Some(place),
                    Err(MemoryShortage::TooLarge) => {
                        self.refuse(place, actions);
                        return None;
                    }
                },
            }
            place = place.behind();
        }
        None
    }

    /// Fails a request for a model that is too large for this GPU.
    fn refuse(&mut self, place: LinePlace, actions: &mut Vec<Action>) {
        let key = self.remove_request(place, actions).key;
        actions.push(Action::Failed { key, reason: Reason::NoGpuMemory, may_have_executed: false });
        actions.push(Action::Ended { key, ran: None });
    }

    /// Cancels transfers that keep memory from a request without room: transfers that no request
    /// waits for. For the most urgent of all first requests, transfers for queued requests make way,
    /// too. `rank` is the line's place in the visiting order.
    fn make_way(&mut self, rank: usize, place: LinePlace, actions: &mut Vec<Action>) {
        let spared: Vec<ModelId> = if rank == 0 && place.is_first() {
            // The model of a sent run stays until the end of the run. Without its transfer, the run
            // would only end later.
            self.lines.get(place).map(|slot| slot.model).into_iter().chain(self.sent_models()).collect()
        } else {
            self.lines.iter().map(|slot| slot.model).collect()
        };
        self.cancel_transfers(|moving| !spared.contains(&moving.model), actions);
    }

    /// Whether all of a model's weights are on this GPU.
    pub(super) fn complete(&self, model: ModelId) -> bool {
        self.memory.region(model).is_some_and(|region| region.loaded().complete())
            && !self.leftovers.contains(&model)
    }

    fn begin_turn(&mut self, now: Timestamp, line: usize) {
        let place = LinePlace::first_in(line);
        let Some(&slot) = self.lines.get(place).filter(|slot| slot.turn.is_none()) else { return };
        let was_resident = self.complete(slot.model);
        if let Some(slot) = self.lines.get_mut(place) {
            slot.turn = Some(now);
            slot.was_resident = was_resident;
        }
    }

    /// Sends a request to the executor, with everything that it needs.
    fn send(
        &mut self,
        now: Timestamp,
        place: LinePlace,
        slot: AssignedRequest,
        actions: &mut Vec<Action>,
    ) -> Result<(), MemoryShortage> {
        let model = slot.model;
        if self.memory.region(model).is_none() {
            self.load_model(now, model, actions)?;
        }
        self.take_workspace(place, model, actions)?;
        self.prefetched.remove(&model);
        self.programs.asked(now, model);
        self.memory.touch(now, model);
        let region = self.memory.region(model).ok_or(MemoryShortage::Pinned)?;
        let generation = region.generation();
        self.last_run = RunId(self.last_run.0 + 1);
        let run = self.last_run;
        if let Some(slot) = self.lines.get_mut(place) {
            slot.stage = RequestStage::Sent { run, generation };
            slot.sends += 1;
        }
        let tokens = self.tokens_for(now, place, actions);
        let seat = self.lines.seat(place);
        actions.push(Action::Run { run, key: slot.key, model, generation, seat, tokens });
        Ok(())
    }

    /// Takes memory for what a run computes beside a run of the same model on another seat. The region of
    /// the model has such memory for one run.
    fn take_workspace(
        &mut self,
        place: LinePlace,
        model: ModelId,
        actions: &mut Vec<Action>,
    ) -> Result<(), MemoryShortage> {
        let seat = self.lines.seat(place);
        let own = |it: &RunWorkspace| it.seat == seat && it.model == model;
        if !self.lines.others_send(seat, model)
            || self.lines.sends(seat, model)
            || self.workspaces.iter().any(own)
        {
            return Ok(());
        }
        let needed = self.programs.shape(model).map_or(0, |shape| shape.blocks - shape.weight_blocks);
        if needed > 0 {
            let in_use = self.in_use();
            // A run that has no room waits for the other run to end.
            let taken = self.memory.take_blocks(needed, &in_use).map_err(|_| MemoryShortage::Pinned)?;
            let (blocks, evicted) = taken;
            self.note_evicted(&evicted, actions);
            self.workspaces.push(RunWorkspace { seat, model, blocks });
        }
        Ok(())
    }

    /// Has the executor load a model, and maps a region for it.
    fn load_model(
        &mut self,
        now: Timestamp,
        model: ModelId,
        actions: &mut Vec<Action>,
    ) -> Result<(), MemoryShortage> {
        match self.map_model(now, model, &self.spared_models(), actions) {
            // Evict models that other requests wait for: these requests wait a little longer.
            Err(MemoryShortage::Pinned) => self.map_model(now, model, &self.in_use(), actions),
            placed => placed,
        }
    }

    /// Returns the models with runs that were sent, or with a transfer in flight.
    pub(super) fn in_use(&self) -> Vec<ModelId> {
        self.sent_models().chain(self.moving.iter().map(|moving| moving.model)).collect()
    }

    fn sent_models(&self) -> impl Iterator<Item = ModelId> {
        self.lines.iter().filter(|slot| slot.run().is_some()).map(|slot| slot.model)
    }

    /// Does the same as [`Self::load_model`], and evicts none of the models in `spared`.
    pub(super) fn map_model(
        &mut self,
        now: Timestamp,
        model: ModelId,
        spared: &[ModelId],
        actions: &mut Vec<Action>,
    ) -> Result<(), MemoryShortage> {
        // A model that is not installed fits nowhere.
        let shape = self.programs.shape(model).ok_or(MemoryShortage::TooLarge)?;
        if self.isolation.per_model() && self.programs.known(model) == ProgramLoadState::No {
            self.end_surplus_process(spared, actions)?;
        }
        let evicted = self.memory.map(now, model, shape.blocks, shape.chunks, spared)?;
        self.memory.rank(model, self.rank(model));
        self.schedule_unused_check(now, model);
        self.totals.swaps += 1;
        self.note_evicted(&evicted, actions);
        if self.programs.known(model) == ProgramLoadState::No {
            let idle = |model| self.memory.region(model).is_none() && !self.lines.uses(model);
            if let Some(surplus) = self.programs.surplus(PROGRAMS_MAX, idle) {
                self.programs.forget(surplus);
                actions.push(Action::UnloadProgram { model: surplus });
            }
            self.programs.tell(now, model);
            actions.push(Action::LoadProgram { model });
        }
        if let Some(region) = self.memory.region(model) {
            let blocks = first_blocks(region.runs(), shape.weight_blocks);
            actions.push(Action::Map { model, generation: region.generation(), blocks });
        }
        Ok(())
    }

    /// Keeps the link busy for the most urgent request that lacks weights. In each line only the
    /// first such request has a claim.
    fn move_weights(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let lacks = |slot: &&AssignedRequest| {
            slot.stage != RequestStage::Waiting && !slot.doomed && !self.complete(slot.model)
        };
        let Some(&AssignedRequest { model, from, .. }) = self.lines.most_urgent(lacks) else {
            return self.move_prefetched(now, actions);
        };
        let mut candidates: Vec<AssignedRequest> = self.lines.first_of_each(lacks).copied().collect();
        candidates.sort_unstable_by_key(AssignedRequest::urgency);
        let wanted: Vec<ModelId> = candidates.iter().map(|candidate| candidate.model).collect();
        let here: Vec<_> = self
            .moving
            .iter()
            .filter(|moving| self.complete(moving.model))
            .map(|moving| moving.model)
            .collect();
        let unwanted = |model: &ModelId| !wanted.contains(model) && !here.contains(model);
        self.cancel_transfers(|moving| unwanted(&moving.model), actions);
        // A begun transfer for another line ends first. Otherwise lines could cancel each other's
        // transfers without end.
        let for_another =
            |it: &IncomingTransfer| it.model != model && !it.cancelled && wanted.contains(&it.model);
        if !self.moving.iter().any(for_another) {
            self.start_transfer(model, from, actions);
        }
        for AssignedRequest { key, model, .. } in candidates {
            let late = |it: &&mut IncomingTransfer| it.model == model && !it.cancelled && !it.hastened;
            for moving in self.moving.iter_mut().filter(late) {
                moving.hastened = true;
                actions.push(Action::Hasten { transfer: moving.transfer, key });
            }
        }
    }

    /// Starts a transfer of the chunks that a model lacks, unless a transfer for it is in flight.
    pub(super) fn start_transfer(
        &mut self,
        model: ModelId,
        from: Option<GpuIndex>,
        actions: &mut Vec<Action>,
    ) {
        let Some(region) = self.memory.region(model) else { return };
        let Some(shape) = self.programs.shape(model) else { return };
        let generation = region.generation();
        // A cancelled transfer has to end first, so that no chunk is in flight twice.
        if self.moving.iter().any(|moving| moving.generation == generation) {
            return;
        }
        self.last_transfer = TransferId(self.last_transfer.0 + 1);
        let transfer = self.last_transfer;
        let weights = WeightsCargo { model, generation, bytes: shape.weights };
        actions.push(Action::Transfer { transfer, weights, chunks: region.loaded().missing(), from });
        let hastened = self.reader_of(model).is_some();
        self.moving.push(IncomingTransfer {
            transfer,
            model,
            generation,
            cancelled: false,
            counted: false,
            hastened,
        });
    }

    /// Drops models that were removed and that nothing on this GPU uses any longer.
    pub(super) fn sweep(&mut self, actions: &mut Vec<Action>) {
        let lines = &self.lines;
        let moving = &self.moving;
        let lent = &self.lent;
        let moves = |model| moving.iter().any(|moving| moving.model == model);
        let used = |model| {
            let lent = || lent.values().any(|&lent| lent == model);
            lines.uses(model) || moves(model) || lent()
        };
        for (model, known) in self.programs.sweep(used) {
            if let Some(EvictedModel { model, generation }) = self.memory.unmap(model) {
                actions.push(Action::Unmap { model, generation });
                actions.push(Action::Evicted { models: vec![model] });
            }
            if known != ProgramLoadState::No {
                actions.push(Action::UnloadProgram { model });
            }
            actions.push(Action::ModelForgotten { model });
        }
    }

    pub(super) fn cancel_transfers(
        &mut self,
        unwanted: impl Fn(&IncomingTransfer) -> bool,
        actions: &mut Vec<Action>,
    ) {
        for moving in self.moving.iter_mut().filter(|moving| !moving.cancelled && unwanted(moving)) {
            moving.cancelled = true;
            actions.push(Action::CancelTransfer { transfer: moving.transfer });
        }
    }

    pub(super) fn arrived(&mut self, model: ModelId, generation: Generation, chunks: std::ops::Range<u32>) {
        let mapped = self.memory.region(model).is_some_and(|region| region.generation() == generation);
        let Some(shape) = self.programs.shape(model).filter(|_| mapped) else { return };
        let weights = WeightsCargo { model, generation, bytes: shape.weights };
        let counted = self.moving.iter().any(|moving| moving.generation == generation && moving.counted);
        if let Some(slot) = self.lines.most_urgent_mut(|slot| slot.model == model && !counted) {
            slot.swapped += weights.span(&chunks).1;
        }
        self.memory.arrived(model, chunks);
        self.lines.feed(model);
    }

    /// Returns the bytes that were copied for a run that has just ended and whose arrival is not reported
    /// yet, and marks their transfer as counted. The report of a run's end may overtake the reports of its
    /// copies. A run ends only after it has read all weights, so bytes that count as in flight had arrived.
    pub(super) fn take_unreported(&mut self, model: ModelId) -> Bytes {
        let Some(region) = self.memory.region(model) else { return Bytes::ZERO };
        let Some(shape) = self.programs.shape(model) else { return Bytes::ZERO };
        let generation = region.generation();
        let on_its_way = |moving: &&mut IncomingTransfer| moving.generation == generation && !moving.counted;
        let Some(moving) = self.moving.iter_mut().find(on_its_way) else { return Bytes::ZERO };
        moving.counted = true;
        let weights = WeightsCargo { model, generation, bytes: shape.weights };
        region.loaded().missing().iter().map(|chunks| weights.span(chunks).1).sum()
    }
}

/// Returns the first `blocks` blocks of some runs.
pub(super) fn first_blocks(runs: &[BlockRun], blocks: u32) -> Vec<BlockRun> {
    let mut left = blocks;
    let take = |run: &BlockRun| {
        let len = run.len.min(left);
        left -= len;
        (len > 0).then_some(BlockRun { start: run.start, len })
    };
    runs.iter().map_while(take).collect()
}
