//! The resources of a run's processes over time.

use std::time::Duration;

use serde::Serialize;

use crate::cluster::ProcessUsage;

/// The resources of some processes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageSum {
    /// Number of processes.
    pub processes: u64,
    /// Resident bytes of private memory.
    pub private_bytes: u64,
    /// Number of open file descriptors.
    pub descriptors: u64,
}

impl UsageSum {
    pub fn add(&mut self, usage: ProcessUsage) {
        self.processes += 1;
        self.private_bytes += usage.private;
        self.descriptors += usage.fds;
    }
}

/// The resources of all processes at a time, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ClusterUsage {
    /// Time since the start of the timeline.
    #[serde(rename = "atMs", serialize_with = "crate::timeline::millis")]
    pub at: Duration,
    pub controllers: UsageSum,
    pub workers: UsageSum,
    pub executors: UsageSum,
}
