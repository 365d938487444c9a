//! The messages to an Executor actor.

use millrace_core::ids::{BatchId, TransferId};
use millrace_proto::executor::command::Command;
use millrace_transfers::fabric::BatchGrant;
use millrace_types::{GpuIndex, Incarnation, ModelId};

use crate::port::{Descriptor, PortEvent, SharedDeviceMemory};

/// A message to an Executor actor.
pub(crate) enum Message {
    /// The actor starts a process and keeps one alive from now on.
    Start,
    /// A command for the process. The actor drops it if the process is no longer of this incarnation.
    Send { incarnation: Incarnation, command: Command, descriptors: Vec<Descriptor> },
    /// A grant to copy a batch.
    Copy(BatchGrant),
    /// The revocation of a grant.
    Revoke { transfer: TransferId, batch: BatchId },
    /// The actor kills the process that a model has to itself. Ignored if the incarnation is outdated.
    EndProgram { incarnation: Incarnation, model: ModelId },
    /// The actor replaces the process.
    Replace,
    /// An event of the port.
    Port(PortEvent),
    /// The memory of a neighbour's executor, which copies may read.
    Peer { gpu: GpuIndex, incarnation: Incarnation, memory: SharedDeviceMemory },
    /// A neighbour asks for this executor's memory.
    PeerRequested(GpuIndex),
    /// A neighbour's executor is gone, and its memory with it.
    PeerLost(GpuIndex),
    /// The actor stops the process and starts no other.
    Stop,
}
