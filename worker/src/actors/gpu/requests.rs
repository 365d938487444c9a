//! Requests on the GPU, from their assignment to the end of their run. Their inputs are in `inputs`, their
//! outputs in `data`.

use millrace_core::ids::{Generation, RequestKey, RunId};
use millrace_gpu::{Event, ExecutorSeat, GpuTimes};
use millrace_proto::executor::{Run, SeatTokens};
use millrace_types::{ModelId, Timestamp};

use super::actor::{GpuActor, GpuPayload};
use super::assigned_request::GpuRequest;
use crate::actors::batch;
use crate::request::RunOutputs;

/// The place of a run in the executor.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunPlace {
    pub(super) generation: Generation,
    pub(super) seat: ExecutorSeat,
    /// Whether the GPU is shared, so that the run needs tokens.
    pub(super) shared: bool,
}

impl GpuActor {
    pub(super) fn assign(&mut self, now: Timestamp, entry: GpuRequest, assign: Event) {
        let key = entry.key;
        self.entries.insert(key, entry);
        self.step(now, assign, GpuPayload::Nothing);
        // The core ignores a request that was assigned to an earlier executor.
        if !self.core.core.has(key) {
            self.entries.remove(&key);
        }
    }

    pub(super) fn run(
        &mut self,
        now: Timestamp,
        run: RunId,
        key: RequestKey,
        model: ModelId,
        place: RunPlace,
    ) {
        let RunPlace { generation, seat, shared } = place;
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let times = entry.spans.run_begins(run, entry.attempt, entry.works.len());
        // If the core starts the request's run again, its inputs are fetched and recorded again.
        entry.fetches.clear();
        entry.release_inputs(&mut self.data);
        let (inputs, descriptors) = batch::inputs(&entry.works);
        let outputs = entry.work().invocation.outputs.clone();
        let members = entry.works.len();
        let kept = self.entries.get(&key).map(|entry| self.kept_outputs(entry)).unwrap_or_default();
        let run = Run {
            run: run.0,
            program: model.0.into(),
            generation: generation.0,
            inputs,
            outputs,
            kept,
            times,
            members: u32::try_from(members).unwrap_or(u32::MAX),
            seat: seat.0.into(),
            tokens: shared.then(SeatTokens::default),
        };
        self.start_run(now, key, run, descriptors);
    }

    /// Ends the swap spans of requests whose models are completely resident.
    pub(super) fn end_swaps(&mut self) {
        let memory = self.core.core.memory();
        for entry in self.entries.values_mut().filter(|entry| entry.spans.swapping()) {
            if memory.region(entry.work().model).is_some_and(|region| region.loaded().complete()) {
                entry.spans.swap_ends();
            }
        }
    }

    pub(super) fn completed(&mut self, key: RequestKey, spent: GpuTimes, carried: &mut GpuPayload) {
        let (Some(entry), GpuPayload::Outputs(run, outputs)) =
            (self.entries.get_mut(&key), std::mem::replace(carried, GpuPayload::Nothing))
        else {
            return;
        };
        let attempts = entry.attempt;
        let brought = std::mem::take(&mut entry.fetches);
        let works = entry.works.clone();
        let mut little = Vec::new();
        for (work, share) in works.iter().zip(batch::shares(&works)) {
            let mine = brought.iter().filter(|(key, _)| *key == work.key);
            let brought = mine.map(|(_, brought)| brought.clone()).collect();
            let outputs = RunOutputs { share, fetches: brought, ..outputs.clone() };
            little.extend(self.store_outputs(run, work, outputs, spent, attempts));
        }
        self.copy_small_outputs(little);
    }
}
