//! The extent of a run of experiments.

use std::ops::RangeInclusive;

/// The extent of a run of experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    pub first_seed: u64,
    /// The number of seeds.
    pub seeds: u64,
    /// Whether only a part of each workload runs, as in CI. Figures are then not judged.
    pub short: bool,
}

impl Effort {
    /// The seeds of the recorded statuses, with the whole workload.
    pub const FULL: Self = Self { first_seed: 1, seeds: 10, short: false };
    /// One seed of a part of the workload.
    pub const SHORT: Self = Self { first_seed: 1, seeds: 1, short: true };

    /// Returns the seeds of the run.
    #[must_use]
    pub fn each_seed(self) -> RangeInclusive<u64> {
        self.first_seed..=self.first_seed + (self.seeds - 1)
    }
}
