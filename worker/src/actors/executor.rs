//! The Executor actor, one per executor process: keeps a process alive behind its port, passes
//! commands to it, and translates what it says.
//!
//! In: commands from the Gpu and the Links, the port's events. Out: commands to the port, events to
//! the Gpu and to the link its copies came over. Bounded by what a GPU has out:
//! [`SLOTS_MAX`](millrace_policy::gpu::SLOTS_MAX) runs, two batches, and the loads and maps for them.

use millrace_policy::core::Core as _;
use millrace_policy::fabric::{BatchFailure, Grant, link as link_core};
use millrace_policy::gpu::{Event as GpuEvent, RunFailure};
use millrace_policy::ids::{BatchId, Generation, RunId, TransferId};
use millrace_policy::lifecycle::{Action, Event, Lifecycle};
use millrace_proto::executor::{
    ByteRange, Copy, CopyFailure, Ready, Revoke, RunFailure as WireRunFailure, command::Command, event,
};
use millrace_proto::{PROTOCOL_VERSION, executor as wire};
use millrace_types::{GpuIndex, Incarnation, ModelId, Timestamp};
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::actors::driven::Driven;
use crate::actors::function::Outputs;
use crate::actors::{gpu, link, node};
use crate::port::{Descriptor, ExecutorPort, PortEvent, PortEventKind};
use crate::seams::{Behaviour, Slot};

/// What an Executor actor is told.
pub(crate) enum Message {
    /// Keep a process alive.
    Start,
    /// Pass a command on, if the process is still the one it was meant for.
    Send { incarnation: Incarnation, command: Command, descriptors: Vec<Descriptor> },
    /// Carry a grant out.
    Copy(Grant),
    /// Take one back.
    Revoke { transfer: TransferId, batch: BatchId },
    /// Replace the process.
    Replace,
    /// The port heard something.
    Port(PortEvent),
    /// Keep none alive any more.
    Stop,
}

/// The actor.
pub(crate) struct Executor {
    gpu: GpuIndex,
    life: Driven<Lifecycle>,
    up: bool,
    /// It was told to stop: an end is no news then.
    stopping: bool,
    pid: u32,
    port: Box<dyn ExecutorPort>,
    /// Told of every incarnation that is started.
    started: Box<dyn Fn(Incarnation)>,
    to_gpu: Slot<gpu::Message>,
    to_link: Slot<link::Message>,
    to_node: Slot<node::Message>,
}

/// Where an Executor actor's words go.
pub(crate) struct Peers {
    pub(crate) gpu: Slot<gpu::Message>,
    /// The first link of the GPU's path, which issues its grants.
    pub(crate) link: Slot<link::Message>,
    pub(crate) node: Slot<node::Message>,
}

impl Executor {
    pub(crate) fn new(
        gpu: GpuIndex,
        life: Driven<Lifecycle>,
        port: Box<dyn ExecutorPort>,
        started: Box<dyn Fn(Incarnation)>,
        peers: Peers,
    ) -> Self {
        let Peers { gpu: to_gpu, link: to_link, node: to_node } = peers;
        Self { gpu, life, up: false, stopping: false, pid: 0, port, started, to_gpu, to_link, to_node }
    }

    fn step(&mut self, now: Timestamp, event: Event) {
        let actions = self.life.step(now, event);
        for &action in &actions {
            match action {
                Action::Spawn { incarnation } => {
                    tracing::info!(gpu = self.gpu.0, %incarnation, "starting an executor");
                    (self.started)(incarnation);
                    self.port.start(incarnation);
                }
                Action::Kill => {
                    self.up = false;
                    self.port.kill();
                }
                Action::Up { incarnation } => {
                    tracing::info!(gpu = self.gpu.0, %incarnation, pid = self.pid, "executor up");
                    self.up = true;
                    self.to_gpu.post(gpu::Message::Up { incarnation, pid: self.pid });
                }
                Action::Down { .. } => {
                    self.up = false;
                    self.to_gpu.post(gpu::Message::Event(GpuEvent::Down));
                }
                Action::Stopped => self.to_node.post(node::Message::ExecutorStopped(self.gpu)),
            }
        }
        self.life.done(actions);
    }

    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        if self.up {
            self.port.send(command, descriptors);
        }
    }

    fn copy(&mut self, grant: &Grant) {
        let (offset, size) = grant.cargo.span(&grant.chunks);
        let copy = Copy {
            transfer: grant.transfer.0,
            batch: grant.batch.0,
            program: grant.cargo.model.0.into(),
            generation: grant.cargo.generation.0,
            ranges: vec![ByteRange { offset: offset.0, bytes: size.0 }],
            not_before_ns: grant.not_before.0,
            not_after_ns: grant.not_after.0,
        };
        self.send(Command::Copy(copy), Vec::new());
    }

    fn heard(&mut self, now: Timestamp, PortEvent { incarnation, kind }: PortEvent) {
        match kind {
            PortEventKind::Exited { status } => {
                if self.stopping {
                    tracing::info!(gpu = self.gpu.0, %incarnation, status, "executor stopped");
                } else {
                    tracing::warn!(gpu = self.gpu.0, %incarnation, status, "executor died");
                }
                self.step(now, Event::Exited { incarnation });
            }
            PortEventKind::SpawnFailed { message } => {
                tracing::error!(gpu = self.gpu.0, %incarnation, message, "no executor was started");
                self.step(now, Event::Exited { incarnation });
            }
            PortEventKind::Event(event::Event::Ready(ready), _) => self.ready(now, incarnation, &ready),
            // What an earlier process said, or one that is being replaced.
            PortEventKind::Event(..) if !self.up || incarnation != self.life.core.incarnation() => {}
            PortEventKind::Event(event, descriptors) => self.said(event, descriptors),
        }
    }

    fn ready(&mut self, now: Timestamp, incarnation: Incarnation, ready: &Ready) {
        if ready.protocol_version == PROTOCOL_VERSION {
            self.pid = ready.pid;
            self.step(now, Event::Ready { incarnation });
        } else {
            let (theirs, ours) = (ready.protocol_version, PROTOCOL_VERSION);
            tracing::error!(theirs, ours, "the executor speaks another protocol: use one build for both");
            self.step(now, Event::Kill);
        }
    }

    /// Translates an executor's words for whom they are meant.
    fn said(&mut self, event: event::Event, descriptors: Vec<OwnedFd>) {
        use event::Event as Said;
        match event {
            Said::CopyDone(done) => self.tell_link(link_core::Event::Done {
                transfer: TransferId(done.transfer),
                batch: BatchId(done.batch),
                started: Timestamp(done.started_ns),
                finished: Timestamp(done.finished_ns),
            }),
            Said::CopyFailed(failed) => {
                tracing::debug!(gpu = self.gpu.0, failure = ?failed.failure(), message = failed.message, "copy");
                let (transfer, batch) = (TransferId(failed.transfer), BatchId(failed.batch));
                self.tell_link(link_core::Event::Failed {
                    transfer,
                    batch,
                    why: batch_failure(failed.failure()),
                });
            }
            Said::RunDone(done) => {
                let event = GpuEvent::RunDone {
                    run: RunId(done.run),
                    started: Timestamp(done.started_ns),
                    finished: Timestamp(done.finished_ns),
                    waited: Duration::from_nanos(done.waited_ns),
                };
                let outputs = Outputs { tensors: done.outputs, descriptors };
                self.to_gpu.post(gpu::Message::RunDone { event, outputs });
            }
            Said::RunFailed(failed) => {
                let event =
                    GpuEvent::RunFailed { run: RunId(failed.run), why: run_failure(failed.failure()) };
                self.to_gpu.post(gpu::Message::RunFailed { event, detail: failed.message });
            }
            Said::ProgramFailed(failed) => {
                tracing::error!(
                    gpu = self.gpu.0,
                    program = failed.program,
                    message = failed.message,
                    "program"
                );
                self.tell_gpu_of(failed.program, |model| GpuEvent::ProgramFailed { model });
            }
            Said::ProgramLoaded(loaded) => {
                self.tell_gpu_of(loaded.program, |model| GpuEvent::ProgramLoaded { model });
            }
            Said::MapFailed(failed) => {
                tracing::error!(gpu = self.gpu.0, program = failed.program, message = failed.message, "map");
                let generation = Generation(failed.generation);
                self.tell_gpu_of(failed.program, |model| GpuEvent::MapFailed { model, generation });
            }
            Said::RunCancelled(cancelled) => {
                self.tell_gpu(GpuEvent::RunCancelled { run: RunId(cancelled.run) });
            }
            Said::DeviceFailed(failed) => {
                tracing::error!(gpu = self.gpu.0, message = failed.message, "the device failed");
                self.tell_gpu(GpuEvent::DeviceFailed);
            }
            // Commands are carried out in order, so nobody waits for an unmap; a second Ready means nothing.
            Said::Unmapped(_) | Said::Ready(_) => {}
        }
    }

    fn tell_gpu(&self, event: GpuEvent) {
        self.to_gpu.post(gpu::Message::Event(event));
    }

    fn tell_gpu_of(&self, program: u64, event: impl FnOnce(ModelId) -> GpuEvent) {
        // Programs are named after models; another name is not ours.
        if let Ok(model) = u32::try_from(program) {
            self.tell_gpu(event(ModelId(model)));
        }
    }

    fn tell_link(&self, event: link_core::Event) {
        self.to_link.post(link::Message::Event(event));
    }
}

fn batch_failure(failure: CopyFailure) -> BatchFailure {
    match failure {
        CopyFailure::Expired | CopyFailure::Revoked => BatchFailure::NotBegun,
        CopyFailure::Unspecified
        | CopyFailure::StaleGeneration
        | CopyFailure::NotMapped
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

impl Behaviour for Executor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Start => self.step(now, Event::Start),
            Message::Send { incarnation, command, descriptors } => {
                if incarnation == self.life.core.incarnation() {
                    self.send(command, descriptors);
                }
            }
            Message::Copy(grant) => self.copy(&grant),
            Message::Revoke { transfer, batch } => {
                let revoke = Revoke { transfer: transfer.0, batch: batch.0 };
                self.send(Command::Revoke(revoke), Vec::new());
            }
            Message::Replace => self.step(now, Event::Kill),
            Message::Port(event) => self.heard(now, event),
            Message::Stop => {
                self.stopping = true;
                self.send(Command::Shutdown(wire::Shutdown {}), Vec::new());
                self.step(now, Event::Stop);
            }
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.life.core.next_wake()
    }
}
