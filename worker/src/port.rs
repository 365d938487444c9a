//! The seam to executor processes. An [`ExecutorPort`] is one GPU's place for an executor: it
//! starts an incarnation, sends it commands, kills it, and reports what it hears. It decides
//! nothing: when to start, what to send and what a death means is the Executor actor's.
//!
//! Two implementations: real processes (`process_port`) and a model of them in virtual time
//! ([`modelled`]). [`isolating`] puts one port in front of several.

pub mod isolating;
mod links;
pub mod model;
pub mod modelled;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millrace_proto::executor::{command, event};
use millrace_types::{Bytes, GpuIndex, Incarnation};

/// A descriptor that several executors may be sent: a model's weights go to each GPU.
pub type Descriptor = Arc<OwnedFd>;

/// One GPU's executor, seen from the worker. Every call returns at once and none fails: what goes
/// wrong comes back as a [`PortEvent`]. Lives on the actor thread. Dropping it kills the process.
pub trait ExecutorPort: 'static {
    /// Starts a process. The port shakes hands by itself (`Hello`, with the device's memory); the
    /// executor's `Ready` is passed on like any other event. Called only when there is none: after
    /// [`PortEventKind::Exited`] or [`PortEventKind::SpawnFailed`] of the one before.
    fn start(&mut self, incarnation: Incarnation);

    /// Sends a command after all that were sent before. Descriptors are in the order in which the
    /// command's `*_fd` fields count them. Dropped where there is no process any more.
    fn send(&mut self, command: command::Command, descriptors: Vec<Descriptor>);

    /// The present executor's device memory, for the executors of GPUs that copy from this one. `None`
    /// where there is no process, or none whose memory can be shared.
    fn memory(&self) -> Option<Lent> {
        None
    }

    /// Kills the process, if there is one, with a signal it cannot ignore. Its end is reported.
    fn kill(&mut self);

    /// Kills the process that a program has to itself, if it has one. Its end is reported.
    fn kill_program(&mut self, _program: u64) {}

    /// Looks at what came out of the port's sink before anybody acts on it. Gives what it means for
    /// the GPU, if anything.
    fn heard(&mut self, event: PortEvent) -> Option<PortEvent> {
        Some(event)
    }
}

/// A GPU's memory, lent to the executors of others.
#[derive(Debug, Clone)]
pub struct Lent {
    /// Where it is.
    pub descriptor: Descriptor,
    /// Its size.
    pub bytes: Bytes,
}

/// What a port heard.
#[derive(Debug)]
pub struct PortEvent {
    /// From which start of the process.
    pub incarnation: Incarnation,
    /// What.
    pub kind: PortEventKind,
}

/// The kinds of [`PortEvent`].
#[derive(Debug)]
pub enum PortEventKind {
    /// The executor said something; descriptors in the order in which the event counts them.
    Event(event::Event, Vec<OwnedFd>),
    /// The process ended and everything it had said before was delivered. The last event of its
    /// incarnation.
    Exited {
        /// Its exit status or signal, for people.
        status: String,
    },
    /// A process that a program has to itself is up.
    ProgramUp {
        /// Which program.
        program: u64,
        /// The process.
        pid: u32,
    },
    /// It ended by itself, and everything it had said before was delivered.
    ProgramLost {
        /// Which program.
        program: u64,
        /// Its exit status or signal, for people.
        status: String,
    },
    /// What one process of several said: for [`ExecutorPort::heard`].
    Part(isolating::PartId, Box<PortEventKind>),
    /// No process was started. The only event of its incarnation.
    SpawnFailed {
        /// Why.
        message: String,
    },
}

/// Where a port's events go. May be called from any thread; the events are handled on the actor
/// thread in the order of the calls.
#[derive(Clone)]
pub struct PortSink(Arc<dyn Fn(PortEvent) + Send + Sync>);

impl PortSink {
    /// Hands each event to `deliver`.
    pub fn new(deliver: impl Fn(PortEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(deliver))
    }

    /// Delivers an event.
    pub fn deliver(&self, event: PortEvent) {
        (self.0)(event);
    }
}

impl fmt::Debug for PortSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortSink")
    }
}

/// Makes ports. Handed to the actor thread in the node's context.
pub trait Spawner: Send + 'static {
    /// The port of one GPU. Called on the actor thread, once, and again when its Executor actor
    /// was restarted (the old port is dropped first).
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort>;
}
