//! The interface between the Executor actors and executor processes. An [`ExecutorPort`] is the slot of
//! one GPU for an executor: the port starts an incarnation, sends commands to the process, kills the
//! process, and reports its events. A port decides nothing. The Executor actor decides when to start a
//! process, which commands to send, and how to react to the process's end.
//!
//! There are two implementations: real processes (`process_port`) and modelled processes in virtual time
//! ([`modelled`]). [`isolating`] combines several ports into a single port.

pub mod isolating;
mod links;
pub mod model;
pub mod modelled;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millrace_device::emulated::SmPage;
use millrace_proto::executor::{command, event};
use millrace_types::{Bytes, GpuIndex, Incarnation};

/// A descriptor that may be sent to several executors, for example a model's weights.
pub type Descriptor = Arc<OwnedFd>;

/// The worker's side of one GPU's executor. Calls return at once and never fail: failures are reported as
/// [`PortEvent`]s. A port lives on the actor thread. Dropping the port kills its process.
pub trait ExecutorPort: 'static {
    /// Starts a process. The port sends `Hello` with the device's memory by itself, and passes the
    /// executor's `Ready` on like any other event. Called only while no process exists: for the first
    /// time, or after [`PortEventKind::Exited`] or [`PortEventKind::SpawnFailed`] of the previous
    /// process.
    fn start(&mut self, incarnation: Incarnation);

    /// Sends a command after all earlier commands. The command's `*_fd` fields are indices into
    /// `descriptors`. The command is dropped if the process has ended.
    fn send(&mut self, command: command::Command, descriptors: Vec<Descriptor>);

    /// Returns the present executor's device memory, for the executors of GPUs that copy from this GPU.
    /// Returns `None` without a process, and for a process whose memory cannot be shared.
    fn memory(&self) -> Option<SharedDeviceMemory> {
        None
    }

    /// Kills the process, if there is one, with a signal that cannot be ignored. The end is reported as an
    /// event.
    fn kill(&mut self);

    /// Kills the executor process that a single model has in isolation, if there is one. The end is reported
    /// as an event.
    fn kill_program(&mut self, _program: u64) {}

    /// Filters an event of the port's sink before the Executor actor handles the event. Returns the event
    /// that the actor has to handle, if any.
    fn filter_event(&mut self, event: PortEvent) -> Option<PortEvent> {
        Some(event)
    }
}

/// A GPU's memory, shared with the executors of other GPUs.
#[derive(Debug, Clone)]
pub struct SharedDeviceMemory {
    pub descriptor: Descriptor,
    pub bytes: Bytes,
    /// The account of the SMs of an emulated GPU, if there is one.
    pub sms: Option<SmPage>,
}

/// An event of a port.
#[derive(Debug)]
pub struct PortEvent {
    /// The incarnation of the process that the event is about.
    pub incarnation: Incarnation,
    pub kind: PortEventKind,
}

/// The kinds of [`PortEvent`].
#[derive(Debug)]
pub enum PortEventKind {
    /// An event of the executor. The event's `*_fd` fields are indices into the descriptors.
    Event(event::Event, Vec<OwnedFd>),
    /// The process ended, and all its earlier events were delivered. This is the last event of its
    /// incarnation.
    Exited {
        /// The exit status or signal, as text for people.
        status: String,
    },
    /// The executor process of a single model is up.
    ProgramUp { program: u64, pid: u32 },
    /// The executor process of a single model ended by itself, and all its earlier events were delivered.
    ProgramLost {
        program: u64,
        /// The exit status or signal, as text for people.
        status: String,
    },
    /// An event of one of several processes, which [`ExecutorPort::filter_event`] consumes.
    Part(ProcessId, Box<PortEventKind>),
    /// The process could not be started. This is the only event of its incarnation.
    SpawnFailed {
        /// The cause, as text for people.
        message: String,
    },
}

/// The number of a process of an isolating port, unique for the life of the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId(pub(super) u64);

/// The receiver of a port's events. May be called from any thread. The actor thread handles the events in
/// the order of the calls.
#[derive(Clone)]
pub struct PortSink(Arc<dyn Fn(PortEvent) + Send + Sync>);

impl PortSink {
    /// Returns a sink that calls `deliver` with each event.
    pub fn new(deliver: impl Fn(PortEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(deliver))
    }

    pub fn deliver(&self, event: PortEvent) {
        (self.0)(event);
    }
}

impl fmt::Debug for PortSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortSink")
    }
}

/// The factory of ports, sent to the actor thread with the node's context.
pub trait PortFactory: Send + 'static {
    /// Returns the port of a GPU. Called on the actor thread when the GPU's Executor actor starts, and
    /// again when that actor restarts. The old port is dropped first.
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort>;
}
