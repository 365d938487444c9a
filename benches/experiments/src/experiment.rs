//! An experiment: a name, a title, and the function that runs the experiment with an effort.

use anyhow::Result;

use crate::report::ExperimentReport;

/// The extent of a run of experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// The number of seeds, from 1.
    pub seeds: u64,
    /// Whether only a part of each workload runs, as in CI. Figures are then not judged.
    pub short: bool,
}

impl Effort {
    /// Ten seeds of the whole workload.
    pub const FULL: Self = Self { seeds: 10, short: false };
    /// One seed of a part of the workload.
    pub const SHORT: Self = Self { seeds: 1, short: true };
}

/// An experiment.
pub struct Experiment {
    /// The name: the row of the paper's result (docs/experiments.md).
    pub id: &'static str,
    /// The title of the experiment's section.
    pub title: &'static str,
    /// Runs the experiment.
    pub run: fn(Effort) -> Result<ExperimentReport>,
}
