//! What a modelled executor is told and what it says: the messages of the real one's socket, as far
//! as they matter in time. No bytes, no tensors, no addresses.

use std::time::Duration;

use millrace_policy::paths::{Direction, Hops};
use millrace_types::{Bytes, GpuIndex, Timestamp};

/// What it is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Know a program.
    Load {
        /// Which.
        program: u64,
        /// Its model's name.
        name: String,
        /// Its weights' size.
        weights: Bytes,
    },
    /// Forget it.
    Unload {
        /// Which.
        program: u64,
    },
    /// Give it memory.
    Map {
        /// Which program.
        program: u64,
        /// The mapping's stamp.
        generation: u64,
    },
    /// Take it away.
    Unmap {
        /// Which program.
        program: u64,
        /// The mapping's stamp.
        generation: u64,
    },
    /// Copy a batch.
    Copy(CopyOrder),
    /// Forget a batch that has not begun.
    Revoke {
        /// Of which transfer.
        transfer: u64,
        /// Which.
        batch: u64,
    },
    /// Run a program.
    Run {
        /// The run's name.
        run: u64,
        /// Which program.
        program: u64,
        /// Over which mapping.
        generation: u64,
        /// Of how many requests.
        members: u32,
        /// Whether its outputs are to stay.
        keeps: bool,
    },
    /// Give an object memory, and what it is to be filled with, if that is a run's. It takes no time, as a
    /// move within the GPU.
    Place {
        /// Which.
        object: u64,
    },
    /// Take it away.
    Free {
        /// Which object.
        object: u64,
    },
    /// Copy something to the host: at once and in no time, or batch by batch as that is ordered.
    CopyOut {
        /// What the copy is called.
        copy: u64,
        /// Whether it goes batch by batch.
        granted: bool,
    },
    /// No more batches of such a copy come.
    EndCopyOut {
        /// Which copy.
        copy: u64,
    },
    /// Drop a run that has not begun.
    Cancel {
        /// Which.
        run: u64,
    },
}

/// What a batch is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// The weights of a program.
    Program {
        /// Which.
        program: u64,
        /// The mapping's stamp.
        generation: u64,
    },
    /// An object that comes here.
    Object(u64),
    /// A copy to the host.
    CopyOut(u64),
}

/// A batch to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOrder {
    /// Of which transfer.
    pub transfer: u64,
    /// Which.
    pub batch: u64,
    /// What of.
    pub of: Of,
    /// From which GPU, where it comes from another.
    pub from: Option<GpuIndex>,
    /// By the way of which GPUs it comes from the host or goes there, where others forward it; this one is
    /// the last, or the first.
    pub via: Option<Hops>,
    /// How long it is on its way beyond what it takes at the rate of its slowest link, where it crosses
    /// several: its chunks are forwarded as they come.
    pub fill: Duration,
    /// How much.
    pub size: Bytes,
    /// Not to begin before.
    pub not_before: Timestamp,
    /// Not to begin after.
    pub not_after: Timestamp,
}

impl CopyOrder {
    /// Which way its bytes go.
    #[must_use]
    pub fn way(&self) -> Way {
        let direction = match self.of {
            Of::Program { .. } | Of::Object(_) => Direction::ToGpu,
            Of::CopyOut(_) => Direction::FromGpu,
        };
        self.via.map_or(Way::Own(direction), |hops| Way::Forwarded(direction, hops))
    }
}

/// A way to a GPU or from it, on which it copies one thing at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Its own, from other GPUs included.
    Own(Direction),
    /// Over NVLinks from or to the GPU whose links lead on to the host or from there: the first of these where
    /// it comes, the last where it goes.
    Forwarded(Direction, Hops),
}

/// What it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// It is ready.
    Ready,
    /// It knows a program.
    Loaded {
        /// Which.
        program: u64,
    },
    /// It copied a batch.
    CopyDone {
        /// Of which transfer.
        transfer: u64,
        /// Which.
        batch: u64,
        /// When it began.
        started: Timestamp,
        /// When it ended.
        finished: Timestamp,
        /// How much it was.
        size: Bytes,
    },
    /// It did not.
    CopyFailed {
        /// Of which transfer.
        transfer: u64,
        /// Which.
        batch: u64,
        /// Why.
        why: CopyRefusal,
    },
    /// A run ended with outputs.
    RunDone {
        /// Which.
        run: u64,
        /// When its first launch began.
        started: Timestamp,
        /// When its last launch ended.
        finished: Timestamp,
        /// How long it waited for weights in between.
        waited: Duration,
        /// How much of its outputs stays.
        kept: Option<Bytes>,
    },
    /// An object has memory.
    Placed {
        /// Which.
        object: u64,
    },
    /// A copy to the host was made at once.
    CopiedOut {
        /// Which.
        copy: u64,
    },
    /// The model failed on its input.
    RunFailed {
        /// Which run.
        run: u64,
    },
    /// What a run reads is not there.
    RunNotThere {
        /// Which run.
        run: u64,
    },
    /// A run was dropped.
    RunCancelled {
        /// Which.
        run: u64,
    },
    /// The process ended.
    Exited,
}

/// Why a batch was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyRefusal {
    /// It could not begin in time, or was revoked.
    NotBegun,
    /// There is no such mapping, object or copy to the host.
    NotMapped,
    /// The device failed.
    Device,
}
