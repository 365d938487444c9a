//! What the processes of a run took of the machine, over time.

use std::time::Duration;

use serde::Serialize;

use crate::cluster::Usage;

/// What some processes took together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sum {
    /// How many there were.
    pub processes: u64,
    /// Resident bytes of their own.
    pub private_bytes: u64,
    /// Open file descriptors.
    pub descriptors: u64,
}

impl Sum {
    /// Adds a process.
    pub fn add(&mut self, usage: Usage) {
        self.processes += 1;
        self.private_bytes += usage.private;
        self.descriptors += usage.fds;
    }
}

/// What all of them took at some time, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// Since the timeline began.
    #[serde(rename = "atMs", serialize_with = "crate::timeline::millis")]
    pub at: Duration,
    /// Controllers.
    pub controllers: Sum,
    /// Workers.
    pub workers: Sum,
    /// Executors.
    pub executors: Sum,
}
