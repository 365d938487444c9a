//! The Gpu actor, one per GPU. The actor owns the GPU's memory map, and carries each assigned request
//! through swap and run to its answer.
//!
//! In: requests from the Node, events from the GPU's Executor, arrivals from the fabric. Out: commands to
//! the Executor, transfers and ends of requests to the Node, answers to the Functions. Dispatch bounds the
//! actor's state: [`SLOTS_MAX`](millrace_core::SLOTS_MAX) requests at a time.

mod actions;
mod actor;
mod assigned_request;
mod data;
mod incoming;
mod inputs;
mod object_table;
mod outgoing;
mod report;
mod requests;
mod seat_tokens;
#[cfg(test)]
mod tests;
mod transfers;
mod unsent_periods;

use millrace_gpu::Event;
use millrace_proto::executor::InjectFault;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents as TensorContents;
use millrace_types::Timestamp;
use tracing::Span;

pub(crate) use self::actor::{GpuActor, GpuPeers};

use self::actor::GpuPayload;
use self::assigned_request::GpuRequest;
use crate::actor_runtime::ActorBehaviour;
use crate::actors::spans::GpuSpans;
use crate::messages::gpu::Message;

/// The program of a fault that concerns no particular program.
const NO_PROGRAM: u64 = u64::MAX;

impl ActorBehaviour for GpuActor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Install { model, memory, prepared } => {
                let weights = prepared.weights_bytes;
                self.models.insert(model, prepared);
                self.step(now, Event::Install { model, memory, weights }, GpuPayload::Nothing);
            }
            Message::Remove(model) => self.step(now, Event::Remove { model }, GpuPayload::Nothing),
            Message::Assign { seat, key, works, incarnation, attempt, from, deadline, right } => {
                let parent = works.first().map_or_else(Span::none, |work| work.span.clone());
                let entry = GpuRequest {
                    key,
                    works,
                    attempt,
                    spans: GpuSpans::new(parent, self.index()),
                    reserved: Vec::new(),
                    copies: Vec::new(),
                    fetches: Vec::new(),
                };
                let model = entry.work().model;
                let assign = Event::Assign { seat, key, model, incarnation, from, deadline, right };
                self.assign(now, entry, assign);
            }
            Message::Recall(key) => self.step(now, Event::Recall { key }, GpuPayload::Nothing),
            Message::Cancel(key) => self.step(now, Event::Cancel { key }, GpuPayload::Nothing),
            Message::Up { incarnation, pid, sms } => {
                self.note_sms(sms);
                self.data.start_keys(incarnation);
                self.incarnation = incarnation;
                // In isolation each model has its own process, and the shared executor's number is 0.
                self.pid = Some(pid).filter(|&pid| pid != 0);
                self.step(now, Event::Up { incarnation }, GpuPayload::Nothing);
            }
            Message::ProgramUp { model, pid } => {
                if let Some(loaded) = self.loaded.get_mut(&model) {
                    *loaded = Some(pid);
                    self.peers.directory.changed();
                }
            }
            Message::Event(Event::Unlock { transfer }) if self.unlock_object(transfer) => {
                self.handle_data_events(now)
            }
            Message::Event(event) => {
                if let Event::ProgramLost { model } | Event::ProgramFailed { model } = event {
                    self.loaded.remove(&model);
                    self.peers.directory.changed();
                }
                if let Event::TransferEnded { transfer, .. } = event {
                    self.unfinished_swaps.retain(|spans| !spans.swaps_by(transfer));
                    let waiting = self.entries.values_mut().filter(|entry| entry.spans.swaps_by(transfer));
                    waiting.for_each(|entry| entry.spans.swap_ends());
                }
                let arrived = matches!(event, Event::Arrived { .. });
                self.step(now, event, GpuPayload::Nothing);
                if arrived {
                    self.end_swaps();
                }
            }
            Message::Copied(copied) => {
                let spans = self.entries.values().map(|entry| &entry.spans).chain(&self.unfinished_swaps);
                spans.for_each(|spans| spans.copied(now, &copied));
                self.batch_crossed(now, &copied);
            }
            Message::RunDone { run, times, event, outputs } => {
                self.entries.values().for_each(|entry| entry.spans.launched(now, run, &times));
                let kept = outputs
                    .tensors
                    .iter()
                    .any(|it| matches!(it.contents, Some(TensorContents::KeptBytes(_))));
                self.step(now, event, GpuPayload::Outputs(run, outputs));
                if kept {
                    self.drop_unwanted(run);
                }
            }
            Message::Data(said) => {
                self.handle_object_report(said);
                self.handle_data_events(now);
            }
            Message::Object(request) => {
                self.handle_object_request(request);
                self.handle_data_events(now);
            }
            Message::InputFetched { run, place, found } => {
                self.input_fetched(now, run, place, found);
                self.handle_data_events(now);
            }
            Message::LockObject { transfer, piece } => {
                self.lock_object(transfer, piece);
                self.handle_data_events(now);
            }
            Message::ObjectTransferEnded { transfer, outcome, routes } => {
                self.object_transfer_ended(now, transfer, outcome, &routes);
                self.handle_data_events(now);
            }
            Message::HostTransferEnded { transfer, outcome } => {
                self.host_transfer_ended(transfer, outcome);
                self.handle_data_events(now);
            }
            Message::ActorReplaced => self.mark_data_lost(),
            Message::RunFailed { event, detail } => self.step(now, event, GpuPayload::Detail(detail)),
            Message::Inject { fault, model } => {
                let program = model.map_or(NO_PROGRAM, |model| model.0.into());
                self.send(Command::InjectFault(InjectFault { fault: fault.into(), program }), Vec::new());
            }
            Message::Report { parts, users } => self.report(now, &parts, &users),
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick, GpuPayload::Nothing);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.core.next_wake()
    }
}
