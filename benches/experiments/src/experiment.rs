//! An experiment: a name, a title, and the function that runs the experiment with an effort.

use anyhow::Result;

use crate::effort::Effort;
use crate::report::ExperimentReport;

/// An experiment.
pub struct Experiment {
    /// The name: the row of the paper's result (docs/experiments.md).
    pub id: &'static str,
    /// The title of the experiment's section.
    pub title: &'static str,
    /// Runs the experiment.
    pub run: fn(Effort) -> Result<ExperimentReport>,
}
