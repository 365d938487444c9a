//! The Executor actor, one per GPU: keeps a process alive behind its port, or a place for one per model,
//! passes commands to it, and translates what it says.
//!
//! In: commands from the Gpu and the Links, the port's events, the memory of GPUs that NVLinks lead to
//! this one from. Out: commands to the port, events to the Gpu and to the link its copies came over, this
//! one's memory to the others. Bounded by what a GPU has out:
//! [`SLOTS_MAX`](millrace_policy::gpu::SLOTS_MAX) runs, two batches for each of its links and directions, and
//! the loads and maps for them.

mod said;

use millrace_policy::core::Core as _;
use millrace_policy::fabric::{Cargo, Grant, Leaving, Weights};
use millrace_policy::gpu::Event as GpuEvent;
use millrace_policy::ids::{BatchId, TransferId};
use millrace_policy::lifecycle::{Action, Event, Lifecycle};
use millrace_policy::paths::{Direction, Hops};
use millrace_proto::executor::{
    AddPeer, ByteRange, Copy, ForgetPeer, Ready, Revoke, command::Command, event,
};
use millrace_proto::{PROTOCOL_VERSION, executor as wire};
use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Incarnation, ModelId, Timestamp};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::actors::driven::Driven;
use crate::actors::{extents, gpu, link, node};
use crate::groups;
use crate::handle::Directory;
use crate::port::{Descriptor, ExecutorPort, Lent, PortEvent, PortEventKind};
use crate::seams::{Behaviour, Slot};

use self::said::model_of;

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
    /// End the process that a model has to itself.
    EndProgram { incarnation: Incarnation, model: ModelId },
    /// Replace the process.
    Replace,
    /// The port heard something.
    Port(PortEvent),
    /// A neighbour's memory: copies may read it.
    Peer { gpu: GpuIndex, incarnation: Incarnation, memory: Lent },
    /// A neighbour wants to know this one's.
    PeerWanted(GpuIndex),
    /// A neighbour has lost what it had.
    PeerLost(GpuIndex),
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
    peers: Peers,
    /// The link that issued each batch that is out, and who forwards it, where others do.
    out: BTreeMap<(TransferId, BatchId), (LinkId, Option<Forwarded>)>,
}

/// Which way a batch goes that other GPUs forward, and over which of them.
type Forwarded = (Direction, Hops);

/// Where an Executor actor's words go.
pub(crate) struct Peers {
    pub(crate) gpu: Slot<gpu::Message>,
    /// The links that issue grants for the GPU: the first of its path from the host and back, its NVLinks.
    pub(crate) links: BTreeMap<LinkId, Slot<link::Message>>,
    /// The GPUs it has NVLinks with, directly or over others: what crosses those in between is read
    /// where it comes from, too.
    pub(crate) neighbours: BTreeMap<GpuIndex, Slot<Message>>,
    pub(crate) node: Slot<node::Message>,
    pub(crate) directory: Arc<Directory>,
}

impl Executor {
    pub(crate) fn new(
        gpu: GpuIndex,
        life: Driven<Lifecycle>,
        port: Box<dyn ExecutorPort>,
        started: Box<dyn Fn(Incarnation)>,
        peers: Peers,
    ) -> Self {
        Self { gpu, life, up: false, stopping: false, pid: 0, port, started, peers, out: BTreeMap::new() }
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
                    self.gone();
                    self.port.kill();
                }
                Action::Up { incarnation } => {
                    if self.pid == 0 {
                        tracing::info!(gpu = self.gpu.0, %incarnation, "ready for an executor per model");
                    } else {
                        tracing::info!(gpu = self.gpu.0, %incarnation, pid = self.pid, "executor up");
                    }
                    self.up = true;
                    self.peers.gpu.post(gpu::Message::Up { incarnation, pid: self.pid });
                    self.meet_neighbours(incarnation);
                }
                Action::Down { .. } => {
                    self.gone();
                    self.peers.gpu.post(gpu::Message::Event(GpuEvent::Down));
                }
                Action::Stopped => self.peers.node.post(node::Message::ExecutorStopped(self.gpu)),
            }
        }
        self.life.done(actions);
    }

    /// There is no process, or none that is to be listened to.
    fn gone(&mut self) {
        self.out.clear();
        if std::mem::take(&mut self.up) {
            self.peers.neighbours.values().for_each(|peer| peer.post(Message::PeerLost(self.gpu)));
        }
    }

    /// Tells the neighbours of this process's memory, and asks them for theirs.
    fn meet_neighbours(&self, incarnation: Incarnation) {
        for (&neighbour, slot) in &self.peers.neighbours {
            self.show_memory(neighbour, incarnation);
            slot.post(Message::PeerWanted(self.gpu));
        }
    }

    fn show_memory(&self, neighbour: GpuIndex, incarnation: Incarnation) {
        if let (Some(slot), Some(memory)) = (self.peers.neighbours.get(&neighbour), self.port.memory()) {
            slot.post(Message::Peer { gpu: self.gpu, incarnation, memory });
        }
    }

    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        if self.up {
            self.port.send(command, descriptors);
        }
    }

    fn copy(&mut self, grant: &Grant) {
        if !self.up {
            return;
        }
        let via = grant.via.map(|hops| (grant.cargo.direction(), hops));
        self.out.insert((grant.transfer, grant.batch), (grant.link, via));
        let (offset, size) = grant.cargo.span(&grant.chunks);
        let of = match grant.cargo {
            Cargo::Weights(Weights { model, generation, .. }) => {
                Copy { program: model.0.into(), generation: generation.0, ..Copy::default() }
            }
            Cargo::Object(piece) => Copy { object: piece.object.0, ..Copy::default() },
            Cargo::ToHost(Leaving { copy, .. }) => Copy { copy_out: copy, ..Copy::default() },
        };
        let copy = Copy {
            transfer: grant.transfer.0,
            batch: grant.batch.0,
            ranges: vec![ByteRange { offset: offset.0, bytes: size.0 }],
            not_before_ns: grant.not_before.0,
            not_after_ns: grant.not_after.0,
            peer: grant.peer.as_ref().map(|peer| extents::of_peer(peer, offset)),
            via: grant.via.map_or_else(Vec::new, |hops| hops.as_slice().iter().map(|gpu| gpu.0).collect()),
            ..of
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
            _ if !self.up || incarnation != self.life.core.incarnation() => {}
            PortEventKind::Event(event, descriptors) => self.said(event, descriptors),
            PortEventKind::ProgramUp { program, pid } => {
                tracing::info!(gpu = self.gpu.0, program, pid, "executor of one model up");
                if let Some(model) = model_of(program) {
                    self.peers.gpu.post(gpu::Message::ProgramUp { model, pid });
                }
            }
            PortEventKind::ProgramLost { program, status } => {
                tracing::warn!(gpu = self.gpu.0, program, status, "executor of one model died");
                self.tell_gpu_of(program, |model| GpuEvent::ProgramLost { model });
            }
            // The port keeps those to itself.
            PortEventKind::Part(..) => {}
        }
    }

    fn ready(&mut self, now: Timestamp, incarnation: Incarnation, ready: &Ready) {
        if ready.protocol_version == PROTOCOL_VERSION {
            self.pid = ready.pid;
            if let Some(group) = groups::measured(&ready.copy_rates) {
                tracing::info!(gpu = self.gpu.0, %group, "size of a group measured");
                self.peers.directory.measured(group);
            }
            self.step(now, Event::Ready { incarnation });
        } else {
            let (theirs, ours) = (ready.protocol_version, PROTOCOL_VERSION);
            tracing::error!(theirs, ours, "the executor speaks another protocol: use one build for both");
            self.step(now, Event::Kill);
        }
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
            Message::EndProgram { incarnation, model } => {
                if self.up && incarnation == self.life.core.incarnation() {
                    self.port.kill_program(model.0.into());
                }
            }
            Message::Replace => self.step(now, Event::Kill),
            Message::Port(event) => {
                if let Some(event) = self.port.heard(event) {
                    self.heard(now, event);
                }
            }
            Message::Peer { gpu, incarnation, memory } => {
                let Lent { descriptor, bytes } = memory;
                let (gpu, incarnation, memory_bytes) = (gpu.0, incarnation.0, bytes.get());
                let peer = AddPeer { gpu, incarnation, memory_bytes, memory_fd: 0 };
                self.send(Command::AddPeer(peer), vec![descriptor]);
            }
            Message::PeerWanted(gpu) if self.up => self.show_memory(gpu, self.life.core.incarnation()),
            // It will be told when this one is up.
            Message::PeerWanted(_) => {}
            Message::PeerLost(gpu) => {
                self.send(Command::ForgetPeer(ForgetPeer { gpu: gpu.0 }), Vec::new());
            }
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
