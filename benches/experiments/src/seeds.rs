//! The summaries of one setup, run with every seed.

use anyhow::Result;
use millrace_sim::{ClusterScenario, RunSummary, run_each};

use crate::effort::Effort;
use crate::figures::SeedValues;

/// The summaries of one setup, by seed.
#[derive(Debug, Clone, Default)]
pub struct Summaries(pub Vec<RunSummary>);

impl Summaries {
    /// Runs a setup with each seed.
    ///
    /// # Errors
    /// Returns the errors of [`run_each`].
    pub fn of(effort: Effort, setup: impl Fn(u64) -> ClusterScenario) -> Result<Self> {
        let scenarios: Vec<_> = effort.each_seed().map(setup).collect();
        Ok(Self(run_each(&scenarios, |scenario, outcome| outcome.summary(&scenario.functions))?))
    }

    /// Returns the values of a quantity, by seed.
    #[must_use]
    pub fn spread(&self, of: impl Fn(&RunSummary) -> f64) -> SeedValues {
        SeedValues(self.0.iter().map(of).collect())
    }

    /// Returns the mean latencies in milliseconds, by seed.
    #[must_use]
    pub fn mean_ms(&self) -> SeedValues {
        self.spread(|summary| summary.mean.as_secs_f64() * 1e3)
    }
}
