//! The Executor actor, one per GPU. The actor keeps an executor process alive behind its port (in
//! isolation: a slot for one process per model), passes commands to the process, and translates the
//! process's events.
//!
//! In: commands from the Gpu and the Links, the port's events, the memory of GPUs that have NVLinks to this
//! GPU. Out: commands to the port, events to the Gpu and to the link that issued a copy, this GPU's memory
//! to its neighbours. The work that a GPU has outstanding bounds the actor's state:
//! [`SLOTS_MAX`](millrace_core::SLOTS_MAX) runs, two batches for each link and direction, and the
//! loads and maps for the runs.

mod executor_events;

#[cfg(feature = "fuzz")]
pub(crate) use executor_events::gpu_event;
use millrace_core::Core as _;
use millrace_core::ids::{BatchId, TransferId};
use millrace_gpu::Event as GpuEvent;
use millrace_gpu::lifecycle::{Action, Event, Lifecycle};
use millrace_proto::executor::{
    AddPeer, ByteRange, Copy, ForgetPeer, Ready, Revoke, command::Command, event,
};
use millrace_proto::{PROTOCOL_VERSION, executor as wire};
use millrace_transfers::fabric::{BatchGrant, OutgoingCopy, TransferCargo, WeightsCargo};
use millrace_transfers::paths::{HostDirection, RouteHops};
use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Incarnation, ModelId, Timestamp};
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::actor_runtime::{ActorBehaviour, AddressSlot};
use crate::actors::extents;
use crate::groups;
use crate::handle::ActorDirectory;
use crate::messages::executor::Message;
use crate::messages::{gpu, link, node};
use crate::port::{Descriptor, ExecutorPort, PortEvent, PortEventKind, SharedDeviceMemory};
use crate::traced_core::TracedCore;

/// The Executor actor.
pub(crate) struct ExecutorActor {
    gpu: GpuIndex,
    life: TracedCore<Lifecycle>,
    up: bool,
    /// Whether the actor was told to stop. An exit of the process is expected then, and logged as such.
    stopping: bool,
    pid: u32,
    port: Box<dyn ExecutorPort>,
    /// Called with each incarnation before the port starts it.
    started: Box<dyn Fn(Incarnation)>,
    peers: ExecutorPeers,
    /// The link that issued each outstanding batch, and the batch's forwarders if other GPUs forward it.
    outstanding: BTreeMap<(TransferId, BatchId), (LinkId, Option<Forwarded>)>,
}

/// The direction of a batch that other GPUs forward, and those GPUs.
type Forwarded = (HostDirection, RouteHops);

/// The actors that an Executor actor sends messages to.
pub(crate) struct ExecutorPeers {
    pub(crate) gpu: AddressSlot<gpu::Message>,
    /// The links that issue grants for the GPU: the first link of its path to the host, and its NVLinks.
    pub(crate) links: BTreeMap<LinkId, AddressSlot<link::Message>>,
    /// The GPUs that NVLinks join with this GPU, directly or through other GPUs: the executor of the
    /// destination reads the memory of the source also when a route has GPUs in between.
    pub(crate) neighbours: BTreeMap<GpuIndex, AddressSlot<Message>>,
    pub(crate) node: AddressSlot<node::Message>,
    pub(crate) directory: Arc<ActorDirectory>,
}

impl ExecutorActor {
    pub(crate) fn new(
        gpu: GpuIndex,
        life: TracedCore<Lifecycle>,
        port: Box<dyn ExecutorPort>,
        started: Box<dyn Fn(Incarnation)>,
        peers: ExecutorPeers,
    ) -> Self {
        Self {
            gpu,
            life,
            up: false,
            stopping: false,
            pid: 0,
            port,
            started,
            peers,
            outstanding: BTreeMap::new(),
        }
    }

    fn step(&mut self, now: Timestamp, event: Event) {
        let actions = self.life.step(now, event);
        for &action in &actions {
            match action {
                Action::Spawn { incarnation } => {
                    tracing::info!(gpu = self.gpu.0, %incarnation, "starting an executor, or the memory for an executor per model");
                    (self.started)(incarnation);
                    self.port.start(incarnation);
                }
                Action::Kill => {
                    if !self.stopping {
                        tracing::warn!(
                            gpu = self.gpu.0,
                            "killing the executor: it was not ready in time, or a replacement was requested"
                        );
                    }
                    self.forget_process();
                    self.port.kill();
                }
                Action::Up { incarnation } => {
                    if self.pid == 0 {
                        tracing::info!(gpu = self.gpu.0, %incarnation, "ready for an executor per model");
                    } else {
                        tracing::info!(gpu = self.gpu.0, %incarnation, pid = self.pid, "executor up");
                    }
                    self.up = true;
                    let sms = self.port.memory().and_then(|memory| memory.sms);
                    self.peers.gpu.post(gpu::Message::Up { incarnation, pid: self.pid, sms });
                    self.exchange_memory(incarnation);
                }
                Action::Down { .. } => {
                    self.forget_process();
                    self.peers.gpu.post(gpu::Message::Event(GpuEvent::Down));
                }
                Action::Stopped => self.peers.node.post(node::Message::ExecutorStopped(self.gpu)),
            }
        }
        self.life.done(actions);
    }

    /// Forgets the outstanding batches and tells the neighbours that this executor's memory is gone. The
    /// process has ended, or is being killed and its events no longer count.
    fn forget_process(&mut self) {
        self.outstanding.clear();
        if std::mem::take(&mut self.up) {
            self.peers.neighbours.values().for_each(|peer| peer.post(Message::PeerLost(self.gpu)));
        }
    }

    /// Sends this process's memory to the neighbours, and asks for the neighbours' memory.
    fn exchange_memory(&self, incarnation: Incarnation) {
        for (&neighbour, slot) in &self.peers.neighbours {
            self.send_memory(neighbour, incarnation);
            slot.post(Message::PeerRequested(self.gpu));
        }
    }

    fn send_memory(&self, neighbour: GpuIndex, incarnation: Incarnation) {
        if let (Some(slot), Some(memory)) = (self.peers.neighbours.get(&neighbour), self.port.memory()) {
            slot.post(Message::Peer { gpu: self.gpu, incarnation, memory });
        }
    }

    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        if self.up {
            self.port.send(command, descriptors);
        }
    }

    fn copy(&mut self, grant: &BatchGrant) {
        if !self.up {
            return;
        }
        let via = grant.via.map(|hops| (grant.cargo.direction(), hops));
        self.outstanding.insert((grant.transfer, grant.batch), (grant.link, via));
        let (offset, size) = grant.cargo.span(&grant.chunks);
        let of = match grant.cargo {
            TransferCargo::Weights(WeightsCargo { model, generation, .. }) => {
                Copy { program: model.0.into(), generation: generation.0, ..Copy::default() }
            }
            TransferCargo::Object(piece) => Copy { object: piece.object.0, ..Copy::default() },
            TransferCargo::ToHost(OutgoingCopy { copy, .. }) => Copy { copy_out: copy, ..Copy::default() },
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

    fn handle_port_event(&mut self, now: Timestamp, PortEvent { incarnation, kind }: PortEvent) {
        match kind {
            PortEventKind::Exited { status } => {
                if self.stopping {
                    tracing::info!(gpu = self.gpu.0, %incarnation, status, "executor stopped");
                } else {
                    tracing::warn!(gpu = self.gpu.0, %incarnation, status, "executor ended unexpectedly, or was killed to be replaced");
                }
                self.step(now, Event::Exited { incarnation });
            }
            PortEventKind::SpawnFailed { message } => {
                tracing::error!(gpu = self.gpu.0, %incarnation, message, "no executor was started");
                self.step(now, Event::Exited { incarnation });
            }
            PortEventKind::Event(event::Event::Ready(ready), _) => self.ready(now, incarnation, &ready),
            // The event is from an earlier process, or from a process that is being replaced.
            _ if !self.up || incarnation != self.life.core.incarnation() => {}
            PortEventKind::Event(event, descriptors) => self.handle_executor_event(event, descriptors),
            PortEventKind::ProgramUp { program, pid } => {
                tracing::info!(gpu = self.gpu.0, model = program, pid, "executor of one model up");
                if let Some(model) = model_of(program) {
                    self.peers.gpu.post(gpu::Message::ProgramUp { model, pid });
                }
            }
            PortEventKind::ProgramLost { program, status } => {
                tracing::warn!(gpu = self.gpu.0, model = program, status, "executor of one model died");
                self.tell_gpu_of(program, |model| GpuEvent::ProgramLost { model });
            }
            // `ExecutorPort::filter_event` consumes these events of an isolating port.
            PortEventKind::Part(..) => {}
        }
    }

    fn ready(&mut self, now: Timestamp, incarnation: Incarnation, ready: &Ready) {
        if ready.protocol_version == PROTOCOL_VERSION {
            self.pid = ready.pid;
            if let Some(group) = groups::measured(&ready.copy_rates) {
                tracing::info!(gpu = self.gpu.0, %group, "measured the size of a weight group, in which weights are copied");
                self.peers.directory.record_weight_group(group);
            }
            self.step(now, Event::Ready { incarnation });
        } else {
            tracing::error!(
                theirs = ready.protocol_version,
                ours = PROTOCOL_VERSION,
                "the executor speaks another version of the protocol: use one build for both"
            );
            self.step(now, Event::Kill);
        }
    }
}

/// Returns the model of a loaded program. In the executor protocol a program is a loaded model with the
/// model's number, and never a user's program, so another number is not a program of this worker.
fn model_of(program: u64) -> Option<ModelId> {
    u32::try_from(program).ok().map(ModelId)
}

impl ActorBehaviour for ExecutorActor {
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
                if let Some(event) = self.port.filter_event(event) {
                    self.handle_port_event(now, event);
                }
            }
            Message::Peer { gpu, incarnation, memory } => {
                let SharedDeviceMemory { descriptor, bytes, sms: _ } = memory;
                let peer = AddPeer {
                    gpu: gpu.0,
                    incarnation: incarnation.0,
                    memory_bytes: bytes.get(),
                    memory_fd: 0,
                };
                self.send(Command::AddPeer(peer), vec![descriptor]);
            }
            Message::PeerRequested(gpu) if self.up => self.send_memory(gpu, self.life.core.incarnation()),
            // The neighbour gets this executor's memory once this executor is up.
            Message::PeerRequested(_) => {}
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
