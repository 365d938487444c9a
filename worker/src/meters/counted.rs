//! The counters of one function, summed over its revisions.

use millrace_scheduling::admission::FunctionTotals;
use millrace_types::{Slo, SloCounts};

use crate::sequences::SequenceTally;

/// The metrics of a function.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Counted {
    pub(super) score: FunctionTotals,
    pub(super) in_flight: u32,
    /// Restarts of the function's processes; `None` unless the function is a program.
    pub(super) restarts: Option<u64>,
    /// Counts of sequences; `None` unless the function keeps state.
    pub(super) sequences: Option<SequenceTally>,
    pub(super) required: Option<f64>,
}

impl Counted {
    pub(super) fn add(&mut self, Self { score, in_flight, restarts, sequences, .. }: Self) {
        self.score = self.score.plus(score);
        self.in_flight += in_flight;
        self.restarts = self.restarts.into_iter().chain(restarts).reduce(|a, b| a + b);
        self.sequences = self.sequences.into_iter().chain(sequences).reduce(SequenceTally::plus);
    }
}

/// Returns the required request count (T18), `(pn - m) / (1 - p)`, for m of n requests in time.
pub(super) fn required(SloCounts { m, n }: SloCounts, slo: &Slo) -> f64 {
    (slo.percentile * n as f64 - m as f64) / (1.0 - slo.percentile)
}
