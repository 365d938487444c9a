//! The result of a simulation.

use std::time::Duration;

use millrace_memory::elastic::{NativeCalls, ObjectCounts};
use millrace_types::Timestamp;

use crate::outcome::percentile;

/// The latency of a request on its longest path through the workflow, without queues, split into its parts
/// (§9.1). In seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PathBreakdown {
    /// The time of passing data between the host and functions.
    pub host: f64,
    /// The time of passing data between functions.
    pub functions: f64,
    /// The time of computation.
    pub compute: f64,
}

impl PathBreakdown {
    /// Returns the time of passing data.
    #[must_use]
    pub fn passing(&self) -> f64 {
        self.host + self.functions
    }

    /// Returns the sum of all parts.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.passing() + self.compute
    }
}

/// The record of an answered request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimulatedWorkflow {
    /// The index of the app.
    pub app: usize,
    /// The time of the request's arrival.
    pub arrived: Timestamp,
    /// The time at which all functions and responses had ended.
    pub finished: Timestamp,
    pub split: PathBreakdown,
    /// The sum of the times of all copies from the host, in seconds, without calls and pinning.
    pub loading: f64,
}

impl SimulatedWorkflow {
    /// Returns the time from the arrival to the end.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.finished.since(self.arrived)
    }
}

/// The number of copies by method of passing data (D04).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Copies between a GPU and its host.
    pub host_gpu: u64,
    /// Copies within a GPU.
    pub intra: u64,
    /// Copies between two GPUs of a node.
    pub inter: u64,
    /// Copies between nodes.
    pub inter_node: u64,
}

/// The memory of all stores, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StoreMemory {
    /// The allocated memory, on average over time.
    pub allocated: f64,
    /// The memory that objects used, on average over time.
    pub used: f64,
    /// The most memory allocated at once.
    pub peak: f64,
}

/// The result of a simulation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DataflowOutcome {
    /// The records of the requests, in the order of their ends.
    pub records: Vec<SimulatedWorkflow>,
    pub methods: CopyCounts,
    pub memory: StoreMemory,
    /// The native calls of the stores.
    pub calls: NativeCalls,
    /// The numbers of migrated, reloaded and refused objects, and of reads from the host.
    pub counts: ObjectCounts,
    /// The bytes of all transfers.
    pub sent: u64,
    /// The bytes that transfers delivered.
    pub delivered: f64,
    /// The highest use of a link at any event. 0 unless the setup is audited.
    pub fullest: f64,
    /// Whether in the end no link was in use, and no store held an object.
    pub is_clean: bool,
}

impl DataflowOutcome {
    /// Returns the 99th percentile of a value, in seconds, over the requests of an app.
    #[must_use]
    pub fn p99(&self, app: usize, of: impl Fn(&SimulatedWorkflow) -> f64) -> f64 {
        let mut values: Vec<Duration> =
            self.of(app).map(|record| Duration::from_secs_f64(of(record))).collect();
        values.sort_unstable();
        percentile(&values, 99.0).as_secs_f64()
    }

    /// Returns the mean of a value over the requests of an app.
    #[must_use]
    pub fn mean(&self, app: usize, of: impl Fn(&SimulatedWorkflow) -> f64) -> f64 {
        let (sum, count) = self.of(app).fold((0.0, 0u32), |(sum, count), it| (sum + of(it), count + 1));
        sum / f64::from(count.max(1))
    }

    /// Returns the requests that ended in a second, without the first and the last tenth of the requests.
    #[must_use]
    pub fn throughput(&self) -> f64 {
        let tenth = self.records.len() / 10;
        let (Some(first), Some(last)) =
            (self.records.get(tenth), self.records.get(self.records.len().saturating_sub(tenth + 1)))
        else {
            return 0.0;
        };
        let between = self.records.len().saturating_sub(2 * tenth + 1) as f64;
        between / last.finished.since(first.finished).as_secs_f64().max(1e-9)
    }

    fn of(&self, app: usize) -> impl Iterator<Item = &SimulatedWorkflow> {
        self.records.iter().filter(move |record| record.app == app)
    }
}
