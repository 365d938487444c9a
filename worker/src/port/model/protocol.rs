//! The messages of a modelled executor: the commands and events of a real executor's socket, as far as the
//! messages matter for timing. The messages carry no bytes, tensors or addresses.

use std::time::Duration;

use super::seats::ModelledTokens;
use millrace_slices::gate::{GateEvent, SeatToken};
use millrace_slices::tokens::TokenId;
use millrace_transfers::paths::{HostDirection, RouteHops};
use millrace_types::{Bytes, GpuIndex, Timestamp};

/// A command to a modelled executor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelledCommand {
    /// Loads a program.
    Load {
        program: u64,
        /// The name of the program's model.
        name: String,
        /// The size of the weights.
        weights: Bytes,
    },
    /// Unloads a program.
    Unload { program: u64 },
    /// Maps memory for a program's weights.
    Map {
        program: u64,
        /// The mapping's generation.
        generation: u64,
    },
    /// Removes a program's mapping.
    Unmap {
        program: u64,
        /// The mapping's generation.
        generation: u64,
    },
    /// Copies a batch.
    Copy(CopyCommand),
    /// Drops a batch whose copy has not begun.
    Revoke { transfer: u64, batch: u64 },
    /// Runs a program.
    Run {
        run: u64,
        program: u64,
        /// The generation of the mapping that the run reads.
        generation: u64,
        /// The number of requests in the run.
        members: u32,
        /// Whether the outputs stay on the GPU.
        keeps: bool,
        seat: u32,
        /// `None` if the run has the whole GPU.
        tokens: Option<ModelledTokens>,
    },
    /// Gives a seat a token.
    Grant { seat: u32, token: SeatToken },
    /// Ends a token after this device time.
    Shorten { seat: u32, token: TokenId, busy: Duration },
    /// Takes back a token that has not begun.
    Withdraw { seat: u32, token: TokenId },
    /// Maps memory for an object, and fills the object if it is a run's output. This takes no time, because
    /// the bytes move within the GPU.
    Place { object: u64 },
    /// Frees an object's memory.
    Free { object: u64 },
    /// Starts a copy to the host.
    CopyOut {
        copy: u64,
        /// Whether the copy proceeds in granted batches. Otherwise the copy ends at once and takes no time.
        granted: bool,
    },
    /// Ends a copy to the host: no more batches follow.
    EndCopyOut { copy: u64 },
    /// Drops a run that has not begun.
    Cancel { run: u64 },
}

/// The object of a copied batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopiedObject {
    /// The batch is part of a program's weights.
    Program {
        program: u64,
        /// The mapping's generation.
        generation: u64,
    },
    /// The batch is part of an object that is copied to this GPU.
    Object(u64),
    /// The batch is part of a copy to the host.
    CopyOut(u64),
}

/// A batch to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyCommand {
    pub transfer: u64,
    pub batch: u64,
    pub of: CopiedObject,
    /// The source GPU; `None` if the batch is copied from the host or to the host.
    pub from: Option<GpuIndex>,
    /// The GPUs that forward the batch from the host or to the host. This GPU is the last hop of a copy
    /// from the host, and the first hop of a copy to the host.
    pub via: Option<RouteHops>,
    /// The time that a batch over several links needs beyond the time on the slowest link: each chunk is
    /// forwarded as soon as it has arrived.
    pub fill: Duration,
    pub size: Bytes,
    /// The earliest time at which the copy may begin.
    pub not_before: Timestamp,
    /// The latest time at which the copy may begin.
    pub not_after: Timestamp,
}

impl CopyCommand {
    /// Returns the way that the batch is copied on.
    #[must_use]
    pub fn way(&self) -> CopyPath {
        let direction = match self.of {
            CopiedObject::Program { .. } | CopiedObject::Object(_) => HostDirection::ToGpu,
            CopiedObject::CopyOut(_) => HostDirection::FromGpu,
        };
        self.via.map_or(CopyPath::Own(direction), |hops| CopyPath::Forwarded(direction, hops))
    }
}

/// A way to a GPU or from a GPU. A GPU copies one batch at a time on each of its ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CopyPath {
    /// The GPU's own links, to the host and to other GPUs.
    Own(HostDirection),
    /// Other GPUs forward between the host and this GPU over NVLinks. The GPU that uses its own links to
    /// the host is the first hop towards this GPU, and the last hop from this GPU.
    Forwarded(HostDirection, RouteHops),
}

/// An event of a modelled executor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelledEvent {
    /// The process is ready.
    Ready,
    /// A program is loaded.
    Loaded { program: u64 },
    /// A batch was copied.
    CopyDone { transfer: u64, batch: u64, started: Timestamp, finished: Timestamp, size: Bytes },
    /// A batch was not copied.
    CopyFailed { transfer: u64, batch: u64, why: CopyRefusal },
    /// A run ended with outputs.
    RunDone {
        run: u64,
        /// The begin of the first launch.
        started: Timestamp,
        /// The end of the last launch.
        finished: Timestamp,
        /// The total time that launches waited for weights.
        waited: Duration,
        /// The size of the outputs that stay on the GPU, if any do.
        kept: Option<Bytes>,
        /// The total time that launches waited for tokens.
        held: Duration,
        /// The SM time of the run.
        sm: Duration,
        /// The token that the seat holds, with the device time under it.
        token: Option<(TokenId, Duration)>,
    },
    /// A seat's gate has an event for the token core.
    Token { seat: u32, event: GateEvent },
    /// An object has memory.
    Placed { object: u64 },
    /// A copy to the host without grants has ended.
    CopiedOut { copy: u64 },
    /// A run failed: the model failed on the input.
    RunFailed { run: u64 },
    /// A run failed: the program, the mapping or weights are missing.
    RunNotThere { run: u64 },
    /// A waiting run was dropped.
    RunCancelled { run: u64 },
    /// The process ended.
    Exited,
}

/// The reason why a batch was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyRefusal {
    /// The copy could not begin within the window, or was revoked.
    NotBegun,
    /// The mapping, object or copy to the host does not exist.
    NotMapped,
    /// The device failed.
    Device,
}
