//! Translation of an executor process's events into messages to the Gpu and the Links.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::SEATS_MAX;
use millrace_core::ids::ObjectKey;
use millrace_core::ids::{BatchId, Generation, RunId, TransferId};
use millrace_gpu::{Event as GpuEvent, ExecutorSeat, RunFailure};
use millrace_proto::executor::{
    CopyFailure, DeviceFailed, DeviceLoss, MapFailed, ProgramFailed, RunFailure as WireRunFailure, event,
};
use millrace_slices::tokens::TokenId;
use millrace_transfers::fabric::{BatchFailure, link as link_core};
use millrace_types::{Bytes, ModelId, Timestamp};

use super::{ExecutorActor, model_of};
use crate::messages::gpu::{CopiedBatch, ObjectReport};
use crate::messages::{gpu, link};
use crate::request::RunOutputs;

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
            Said::RunDone(mut done) => {
                let descriptors = descriptors.into_iter().map(Arc::new).collect();
                let tensors = std::mem::take(&mut done.outputs);
                let outputs = RunOutputs { tensors, descriptors, ..RunOutputs::default() };
                let times = std::mem::take(&mut done.launch_times);
                let run = RunId(done.run);
                if let Some(event) = gpu_event(&Said::RunDone(done)) {
                    self.peers.gpu.post(gpu::Message::RunDone { run, times, event, outputs });
                }
            }
            Said::RunFailed(mut failed) => {
                let detail = std::mem::take(&mut failed.message);
                if let Some(event) = gpu_event(&Said::RunFailed(failed)) {
                    self.peers.gpu.post(gpu::Message::RunFailed { event, detail });
                }
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
            event => {
                self.log_failure(&event);
                if let Some(event) = gpu_event(&event) {
                    self.tell_gpu(event);
                }
            }
        }
    }

    fn log_failure(&self, event: &event::Event) {
        let gpu = self.gpu.0;
        match event {
            event::Event::ProgramFailed(ProgramFailed { program: model, message }) => {
                tracing::error!(gpu, model, message, "the executor cannot load a model");
            }
            event::Event::MapFailed(MapFailed { program: model, message, .. }) => {
                tracing::error!(gpu, model, message, "the executor cannot map a model's memory");
            }
            event::Event::DeviceFailed(DeviceFailed { message, .. }) => {
                tracing::error!(gpu, message, "the device failed");
            }
            _ => {}
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

/// Returns an executor's event as an event of the GPU's core. Returns `None` for an event of another part of
/// the worker, and for an event of a program or seat that no worker has.
pub(crate) fn gpu_event(event: &event::Event) -> Option<GpuEvent> {
    use event::Event as Said;
    let nanos = Duration::from_nanos;
    Some(match event {
        Said::RunDone(done) => GpuEvent::RunDone {
            run: RunId(done.run),
            started: Timestamp(done.started_ns),
            finished: Timestamp(done.finished_ns),
            waited: nanos(done.waited_ns),
            held: nanos(done.token_wait_ns),
            sm: nanos(done.sm_ns),
            token: done.token.map(|token| (TokenId(token), nanos(done.token_busy_ns))),
        },
        Said::RunFailed(failed) => {
            GpuEvent::RunFailed { run: RunId(failed.run), why: run_failure(failed.failure()) }
        }
        Said::RunCancelled(cancelled) => GpuEvent::RunCancelled { run: RunId(cancelled.run) },
        Said::ProgramLoaded(loaded) => GpuEvent::ProgramLoaded { model: model_of(loaded.program)? },
        Said::ProgramFailed(failed) => GpuEvent::ProgramFailed { model: model_of(failed.program)? },
        Said::MapFailed(failed) => GpuEvent::MapFailed {
            model: model_of(failed.program)?,
            generation: Generation(failed.generation),
        },
        Said::TokenAsked(asked) => GpuEvent::TokenAsked { seat: seat_of(asked.seat)? },
        Said::TokenSpent(spent) => GpuEvent::TokenSpent {
            seat: seat_of(spent.seat)?,
            token: TokenId(spent.token),
            busy: nanos(spent.busy_ns),
            more: spent.more,
        },
        Said::DeviceFailed(failed) => match failed.loss() {
            DeviceLoss::Context => GpuEvent::ContextLost,
            DeviceLoss::Gpu | DeviceLoss::Unspecified => GpuEvent::DeviceFailed,
        },
        // The executor runs commands in order, so no actor waits for an unmap or a free. A second Ready has
        // no meaning. The other events concern links and data.
        Said::Unmapped(_)
        | Said::ObjectFreed(_)
        | Said::Ready(_)
        | Said::CopyDone(_)
        | Said::CopyFailed(_)
        | Said::ObjectPlaced(_)
        | Said::PlaceFailed(_)
        | Said::CopiedOut(_)
        | Said::CopyOutFailed(_) => return None,
    })
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
