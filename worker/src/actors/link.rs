//! The Link actor, one per link between a GPU and the host or between two GPUs. The actor issues the
//! fabric's grants for the paths that begin with its link, tracks the outstanding batches, and measures the
//! link's rate. Each direction of a host link is measured separately.
//!
//! In: grants and revocations from the Node, ends of copies from the executors. Out: copies to the
//! executors, ends to the Node. The fabric bounds the actor's state: at most two outstanding batches per
//! path.

use std::rc::Rc;

use millrace_transfers::fabric;
use millrace_transfers::fabric::link::{Action, Event, LinkLedger as Core};
use millrace_transfers::paths::HostDirection;
use millrace_types::Timestamp;
use millrace_types::topology::{LinkId, TopologyLink as Wire};

use crate::actor_runtime::{ActorBehaviour, AddressSlot};
use crate::messages::link::Message;
use crate::messages::{executor, node};
use crate::snapshot::{LinkSnapshot, SnapshotPart, SnapshotSender};
use crate::traced_core::TracedCore;

/// The Link actor.
pub(crate) struct LinkActor {
    id: LinkId,
    wire: Wire,
    core: TracedCore<Core>,
    node: AddressSlot<node::Message>,
    executors: Rc<[AddressSlot<executor::Message>]>,
}

impl LinkActor {
    pub(crate) fn new(
        id: LinkId,
        wire: Wire,
        core: TracedCore<Core>,
        node: AddressSlot<node::Message>,
        executors: Rc<[AddressSlot<executor::Message>]>,
    ) -> Self {
        Self { id, wire, core, node, executors }
    }

    fn step(&mut self, now: Timestamp, event: Event) {
        let mut actions = self.core.step(now, event);
        for action in actions.drain(..) {
            match action {
                Action::Copy(grant) => {
                    self.executors[grant.gpu.0 as usize].post(executor::Message::Copy(grant));
                }
                Action::Revoke { gpu, transfer, batch } => {
                    self.executors[gpu.0 as usize].post(executor::Message::Revoke { transfer, batch });
                }
                Action::Done { transfer, batch } => {
                    self.node.post(node::Message::Fabric(fabric::Event::Done { transfer, batch }));
                }
                Action::Failed { transfer, batch, why } => {
                    self.node.post(node::Message::Fabric(fabric::Event::Failed { transfer, batch, why }));
                }
            }
        }
        self.core.done(actions);
    }

    fn report(&self, parts: &SnapshotSender) {
        let core = &self.core.core;
        let part = SnapshotPart::Link(LinkSnapshot {
            link: self.id,
            rate: self.wire.rate,
            measured: core.measured(HostDirection::ToGpu),
            carried: core.carried(HostDirection::ToGpu),
            measured_to_host: core.measured(HostDirection::FromGpu),
            carried_to_host: core.carried(HostDirection::FromGpu),
            outstanding: u32::try_from(core.outstanding()).unwrap_or(u32::MAX),
        });
        // The reader of the snapshot may have given up.
        parts.send(part).unwrap_or_default();
    }
}

impl ActorBehaviour for LinkActor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Event(event) => self.step(now, event),
            Message::Report { parts } => self.report(&parts),
        }
    }

    fn tick(&mut self, _: Timestamp) {}

    fn next_wake(&self) -> Option<Timestamp> {
        None
    }
}
