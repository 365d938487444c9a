//! Translation of an executor process's events into messages to the Gpu and the Links.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::SEATS_MAX;
use millrace_core::ids::ObjectKey;
use millrace_core::ids::{BatchId, Generation, RunId, TransferId};
use millrace_gpu::{Event as GpuEvent, ExecutorSeat, RunFailure};
use millrace_proto::executor::{CopyFailure, DeviceLoss, RunFailure as WireRunFailure, event};
use millrace_slices::tokens::TokenId;
use millrace_transfers::fabric::{BatchFailure, link as link_core};
use millrace_types::{Bytes, ModelId, Timestamp};

use super::{ExecutorActor, model_of};
use crate::messages::gpu::{CopiedBatch, ObjectReport};
use crate::messages::request_update::RunOutputs;
use crate::messages::{gpu, link};

impl ExecutorActor {
    /// Translates an executor's event and posts it to the actor that the event concerns.
    pub(super) fn handle_executor_event(&mut self, event: event::Event, descriptors: Vec<OwnedFd>) {
        use event::Event as Said;
        match event {
            Said::CopyDone(done) => {
                let transfer = TransferId(done.transfer);
                let batch = BatchId(done.batch);
                let started = Timestamp(done.started_ns);
                let finished = Timestamp(done.finished_ns);
                if let Some(&(link, via)) = self.outstanding.get(&(transfer, batch)) {
                    let bytes = Bytes(done.bytes);
                    let copied = CopiedBatch { transfer, link, via, started, finished, bytes };
                    self.peers.gpu.post(gpu::Message::Copied(copied));
                }
                let event = link_core::Event::Done { transfer, batch, started, finished };
                self.tell_link(transfer, batch, event);
            }
            Said::CopyFailed(failed) => {
                tracing::debug!(
                    gpu = self.gpu.0,
                    failure = ?failed.failure(),
                    message = failed.message,
                    "a copy failed"
                );
                let transfer = TransferId(failed.transfer);
                let batch = BatchId(failed.batch);
                let why = batch_failure(failed.failure());
                self.tell_link(transfer, batch, link_core::Event::Failed { transfer, batch, why });
            }
            Said::RunDone(done) => {
                let run = RunId(done.run);
                let event = GpuEvent::RunDone {
                    run,
                    started: Timestamp(done.started_ns),
                    finished: Timestamp(done.finished_ns),
                    waited: Duration::from_nanos(done.waited_ns),
                    held: Duration::from_nanos(done.held_ns),
                    sm: Duration::from_nanos(done.sm_ns),
                    token: done.token.map(|token| (TokenId(token), Duration::from_nanos(done.token_busy_ns))),
                };
                let descriptors = descriptors.into_iter().map(Arc::new).collect();
                let tensors = done.outputs;
                let outputs = RunOutputs { tensors, descriptors, ..RunOutputs::default() };
                let times = done.launch_times;
                self.peers.gpu.post(gpu::Message::RunDone { run, times, event, outputs });
            }
            Said::RunFailed(failed) => {
                let event =
                    GpuEvent::RunFailed { run: RunId(failed.run), why: run_failure(failed.failure()) };
                self.peers.gpu.post(gpu::Message::RunFailed { event, detail: failed.message });
            }
            Said::ProgramFailed(failed) => {
                tracing::error!(
                    gpu = self.gpu.0,
                    program = failed.program,
                    message = failed.message,
                    "the executor cannot load a program"
                );
                self.tell_gpu_of(failed.program, |model| GpuEvent::ProgramFailed { model });
            }
            Said::ProgramLoaded(loaded) => {
                self.tell_gpu_of(loaded.program, |model| GpuEvent::ProgramLoaded { model });
            }
            Said::MapFailed(failed) => {
                tracing::error!(
                    gpu = self.gpu.0,
                    program = failed.program,
                    message = failed.message,
                    "the executor cannot map a program's memory"
                );
                let generation = Generation(failed.generation);
                self.tell_gpu_of(failed.program, |model| GpuEvent::MapFailed { model, generation });
            }
            Said::TokenAsked(asked) => {
                if let Some(seat) = seat_of(asked.seat) {
                    self.tell_gpu(GpuEvent::TokenAsked { seat });
                }
            }
            Said::TokenSpent(spent) => {
                if let Some(seat) = seat_of(spent.seat) {
                    let token = TokenId(spent.token);
                    let busy = Duration::from_nanos(spent.busy_ns);
                    self.tell_gpu(GpuEvent::TokenSpent { seat, token, busy, more: spent.more });
                }
            }
            Said::RunCancelled(cancelled) => {
                self.tell_gpu(GpuEvent::RunCancelled { run: RunId(cancelled.run) });
            }
            Said::ObjectPlaced(placed) => self.tell_data(ObjectReport::Placed(ObjectKey(placed.object))),
            Said::PlaceFailed(failed) => {
                tracing::warn!(
                    gpu = self.gpu.0,
                    object = failed.object,
                    message = failed.message,
                    "the executor cannot place an object"
                );
                self.tell_data(ObjectReport::NotPlaced(ObjectKey(failed.object)));
            }
            Said::CopiedOut(copied) => self.tell_data(ObjectReport::CopiedOut(copied.copy)),
            Said::CopyOutFailed(failed) => {
                tracing::warn!(
                    gpu = self.gpu.0,
                    copy = failed.copy,
                    message = failed.message,
                    "the executor cannot copy data to the host"
                );
                self.tell_data(ObjectReport::NotCopiedOut(failed.copy));
            }
            Said::DeviceFailed(failed) => {
                tracing::error!(gpu = self.gpu.0, message = failed.message, "the device failed");
                self.tell_gpu(match failed.loss() {
                    DeviceLoss::Context => GpuEvent::ContextLost,
                    DeviceLoss::Gpu | DeviceLoss::Unspecified => GpuEvent::DeviceFailed,
                });
            }
            // The executor runs commands in order, so no actor waits for an unmap or a free. A second Ready
            // has no meaning.
            Said::Unmapped(_) | Said::ObjectFreed(_) | Said::Ready(_) => {}
        }
    }

    fn tell_gpu(&self, event: GpuEvent) {
        self.peers.gpu.post(gpu::Message::Event(event));
    }

    fn tell_data(&self, said: ObjectReport) {
        self.peers.gpu.post(gpu::Message::Data(said));
    }

    pub(super) fn tell_gpu_of(&self, program: u64, event: impl FnOnce(ModelId) -> GpuEvent) {
        if let Some(model) = model_of(program) {
            self.tell_gpu(event(model));
        }
    }

    fn tell_link(&mut self, transfer: TransferId, batch: BatchId, event: link_core::Event) {
        let issuer = self.outstanding.remove(&(transfer, batch));
        if let Some(link) = issuer.and_then(|(link, _)| self.peers.links.get(&link)) {
            link.post(link::Message::Event(event));
        }
    }
}

/// Returns a seat of the executor; `None` for a number that no seat has.
fn seat_of(number: u32) -> Option<ExecutorSeat> {
    let seat = u8::try_from(number).ok().filter(|&seat| usize::from(seat) < SEATS_MAX)?;
    Some(ExecutorSeat(seat))
}

fn batch_failure(failure: CopyFailure) -> BatchFailure {
    match failure {
        CopyFailure::Expired | CopyFailure::Revoked => BatchFailure::NotBegun,
        CopyFailure::Unspecified
        | CopyFailure::StaleGeneration
        | CopyFailure::NotMapped
        | CopyFailure::Peer
        | CopyFailure::Device => BatchFailure::Faulty,
    }
}

fn run_failure(failure: WireRunFailure) -> RunFailure {
    match failure {
        WireRunFailure::Unspecified | WireRunFailure::Model => RunFailure::Model,
        WireRunFailure::NotResident | WireRunFailure::StaleGeneration | WireRunFailure::UnknownProgram => {
            RunFailure::NotThere
        }
        WireRunFailure::Device => RunFailure::Device,
        WireRunFailure::OutOfMemory => RunFailure::OutOfMemory,
    }
}
