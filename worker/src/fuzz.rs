//! An entry point for a fuzz target of `fuzz/`, which reads an executor's events. Compiled only for this target.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use millrace_core::ids::{RequestKey, SeatIndex};
use millrace_core::{Core as _, SLOTS_MAX};
use millrace_gpu::{Action, ComputeRight, Event, GpuCore};
use millrace_memory::{BlockSize, CHUNK, MemoryMap};
use millrace_proto::executor;
use millrace_proto::frames::FrameDecoder;
use millrace_slices::tokens::Config;
use millrace_transfers::fabric::TransferOutcome;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Timestamp};

use crate::actors::executor::gpu_event;

/// Number of models. Two of them fit into the GPU's memory at a time.
const MODELS: u32 = 3;
const MODEL: Bytes = Bytes(10 * CHUNK.0);
/// Number of seats of the GPU when it is shared.
const SHARED_SEATS: u64 = 8;
/// Time between two events.
const STEP: Duration = Duration::from_millis(7);
/// Maximum number of events of the worker that follow from an event of the executor.
const CONSEQUENCES_MAX: usize = 4_096;

/// Hands the core of a GPU the events of an executor that breaks its protocol, while requests arrive. Each
/// request must end exactly once. An odd first byte shares the GPU. The other bytes are the executor's stream.
///
/// # Panics
/// If the core panics or breaks this promise.
pub fn executor_events(data: &[u8]) {
    play(data);
}

/// Returns the number of completed requests.
fn play(data: &[u8]) -> u32 {
    let [setup, stream @ ..] = data else { return 0 };
    let mut gpu = FuzzedGpu::new(setup & 1 == 1);
    let mut decoder = FrameDecoder::default();
    // A worker handles the frames before an invalid one, and then kills the executor.
    let _invalid = decoder.feed(stream, Vec::new());
    while let Some(frame) = decoder.next_frame() {
        let Ok(executor::Event { event }) = frame.decode() else { break };
        gpu.assign();
        if let Some(event) = event.as_ref().and_then(gpu_event) {
            gpu.step(event);
        }
        gpu.step(Event::Tick);
    }
    gpu.step(Event::Down);
    assert!(gpu.open.is_empty(), "requests never ended: {:?}", gpu.open.keys());
    gpu.completed
}

struct FuzzedGpu {
    core: GpuCore,
    now: Timestamp,
    incarnation: Incarnation,
    seats: u64,
    /// The seats of the requests that have not ended.
    open: BTreeMap<RequestKey, SeatIndex>,
    next: u64,
    completed: u32,
}

impl FuzzedGpu {
    fn new(shared: bool) -> Self {
        let core = GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes(2 * MODEL.0), BlockSize::DEFAULT));
        let seats = if shared { SHARED_SEATS } else { 1 };
        let now = Timestamp(1_000_000);
        let open = BTreeMap::new();
        let mut gpu = Self { core, now, incarnation: Incarnation(1), seats, open, next: 0, completed: 0 };
        if shared {
            gpu.step(Event::Sharing(Some(Config::SLICES)));
        }
        for model in (0..MODELS).map(ModelId) {
            gpu.step(Event::Install { model, memory: MODEL, weights: MODEL });
        }
        gpu.step(Event::Up { incarnation: gpu.incarnation });
        gpu
    }

    /// Assigns a request to the next seat, if the seat has room.
    fn assign(&mut self) {
        let key = RequestKey(self.next);
        self.next += 1;
        let seat = SeatIndex(u32::try_from(key.0 % self.seats).unwrap_or(0));
        if self.open.values().filter(|&&of| of == seat).count() == SLOTS_MAX {
            return;
        }
        self.open.insert(key, seat);
        self.step(Event::Assign {
            seat,
            key,
            model: ModelId(u32::try_from(key.0).unwrap_or(0) % MODELS),
            incarnation: self.incarnation,
            from: None,
            deadline: None,
            right: ComputeRight::Free,
        });
    }

    /// Handles an event, and the events with which the rest of a worker answers the core's actions: every
    /// transfer completes, and a lost executor is replaced.
    fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        let mut handled = 0;
        while let Some(event) = events.pop_front() {
            handled += 1;
            assert!(handled <= CONSEQUENCES_MAX, "an event of an executor has no end");
            let mut actions = Vec::new();
            self.now = self.now + STEP;
            self.core.on_event(self.now, event, &mut actions);
            for action in actions {
                match action {
                    Action::Transfer { transfer, weights, chunks, .. } => {
                        let model = weights.model;
                        let generation = weights.generation;
                        events.extend(chunks.into_iter().map(|chunks| Event::Arrived {
                            model,
                            generation,
                            chunks,
                        }));
                        let outcome = TransferOutcome::Complete;
                        events.push_back(Event::TransferEnded { transfer, outcome, from: None });
                    }
                    Action::Completed { key, .. } => {
                        self.completed += 1;
                        self.end(key);
                    }
                    Action::Failed { key, .. } | Action::RequestReturned { key, .. } => self.end(key),
                    Action::Down { lost } => lost.into_iter().for_each(|(key, _)| self.end(key)),
                    Action::Replace => {
                        self.incarnation = Incarnation(self.incarnation.0 + 1);
                        events.extend([Event::Down, Event::Up { incarnation: self.incarnation }]);
                    }
                    Action::EndProgram { model } => events.push_back(Event::ProgramLost { model }),
                    _ => {}
                }
            }
        }
    }

    fn end(&mut self, key: RequestKey) {
        assert!(self.open.remove(&key).is_some(), "request {} ended twice", key.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_complete_in_the_corpus_of_the_target() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/executor_events");
        let completed = |name: &str| play(&std::fs::read(format!("{corpus}/{name}")).unwrap());
        assert!(completed("runs") >= 3);
        assert!(completed("runs-on-a-shared-gpu") >= 3);
        assert_eq!(completed("failures"), 0);
    }
}
