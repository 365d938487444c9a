//! The messages to a process pool actor.

use std::collections::BTreeSet;

use millrace_core::attempts::AttemptRecord;
use millrace_core::ids::RequestKey;
use millrace_gpu::process_pool::ProcessSlot;
use millrace_proto::function as wire;
use millrace_types::{DataId, Incarnation};

use super::work::SharedWork;
use crate::port::Descriptor;

/// A message to a process pool actor.
pub(crate) enum Message {
    /// The pool starts the processes and keeps them alive from now on.
    Start,
    /// A Function actor admitted a request, which waits for a process from now on.
    Enqueue { work: SharedWork, attempts: AttemptRecord },
    /// No caller waits for a request's answer any longer.
    Withdraw(RequestKey),
    /// The Function actor was restarted and has no requests.
    FunctionReset,
    /// An event of a process.
    Process { place: ProcessSlot, incarnation: Incarnation, heard: ProcessEvent },
    /// The pool stops all processes and starts no others.
    Stop,
}

/// An event of a process.
#[derive(Debug)]
pub(crate) enum ProcessEvent {
    Ready,
    Returned {
        call: u64,
        answer: ProcessReply,
    },
    /// A call could not be sent, because this machine lacks descriptors or memory. The process is
    /// unaffected.
    Unsent {
        call: u64,
        why: String,
    },
    Exited {
        status: String,
    },
    /// The process was killed, because this machine lacks descriptors or memory.
    GivenUp {
        status: String,
    },
}

/// A process's answer to a call.
#[derive(Debug)]
pub(crate) enum ProcessReply {
    Outputs {
        outputs: Vec<wire::Tensor>,
        descriptors: Vec<Descriptor>,
        /// The objects among the outputs that the process stored and that no earlier answer named.
        stored: BTreeSet<DataId>,
    },
    Failed(String),
}
