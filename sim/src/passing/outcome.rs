//! What came of a simulation.

use std::time::Duration;

use millrace_policy::elastic::{Counts, NativeCalls};
use millrace_types::Timestamp;

use crate::outcome::percentile;

/// Where the time of a request went on its longest way through the workflow, queues left out (§9.1).
/// In seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Split {
    /// Between the host and functions.
    pub host: f64,
    /// Between functions.
    pub functions: f64,
    /// Computation.
    pub compute: f64,
}

impl Split {
    /// Passing data.
    #[must_use]
    pub fn passing(&self) -> f64 {
        self.host + self.functions
    }

    /// All of it.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.passing() + self.compute
    }
}

/// A request that was answered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Record {
    /// Of which app.
    pub app: usize,
    /// When it came.
    pub arrived: Timestamp,
    /// When all of it was done.
    pub finished: Timestamp,
    /// Where its time went.
    pub split: Split,
    /// How long the copies from the host took, without what they paid first; together, in seconds.
    pub loading: f64,
}

impl Record {
    /// From its coming to its end.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.finished.since(self.arrived)
    }
}

/// Which way data was passed (D04), by copies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Methods {
    /// Between a GPU and its host.
    pub host_gpu: u64,
    /// Within a GPU.
    pub intra: u64,
    /// Between two GPUs of a node.
    pub inter: u64,
    /// Between nodes.
    pub inter_node: u64,
}

/// The memory of all stores, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Memory {
    /// What was allocated, on average over time.
    pub allocated: f64,
    /// What of it objects had, on average over time.
    pub used: f64,
    /// The most that was allocated at once.
    pub peak: f64,
}

/// What came of a simulation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// The requests, in the order of their ends.
    pub records: Vec<Record>,
    /// Copies by method.
    pub methods: Methods,
    /// The stores' memory.
    pub memory: Memory,
    /// What the stores asked of their devices.
    pub calls: NativeCalls,
    /// What became of objects.
    pub counts: Counts,
    /// Bytes that were to cross links.
    pub sent: u64,
    /// Bytes that did.
    pub delivered: f64,
    /// The fullest link's use at any event; 0 where nobody looked.
    pub fullest: f64,
    /// Whether in the end no link was in use and no store held anything.
    pub is_clean: bool,
}

impl Outcome {
    /// The 99th percentile of something over the requests of an app.
    #[must_use]
    pub fn p99(&self, app: usize, of: impl Fn(&Record) -> f64) -> f64 {
        let mut values: Vec<Duration> =
            self.of(app).map(|record| Duration::from_secs_f64(of(record))).collect();
        values.sort_unstable();
        percentile(&values, 99.0).as_secs_f64()
    }

    /// The mean of something over the requests of an app.
    #[must_use]
    pub fn mean(&self, app: usize, of: impl Fn(&Record) -> f64) -> f64 {
        let (sum, count) = self.of(app).fold((0.0, 0u32), |(sum, count), it| (sum + of(it), count + 1));
        sum / f64::from(count.max(1))
    }

    /// Requests a second between the first and the last tenth of their ends.
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

    fn of(&self, app: usize) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(move |record| record.app == app)
    }
}
