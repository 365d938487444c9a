//! What is shown of each function, its revisions together.

use millrace_policy::admission::Score;
use millrace_types::Slo;

use crate::sequences::Tally;

/// What is shown of a function.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Counted {
    pub(super) score: Score,
    pub(super) in_flight: u32,
    /// Of programs alone.
    pub(super) restarts: Option<u64>,
    /// Of functions that keep state alone.
    pub(super) sequences: Option<Tally>,
    pub(super) required: Option<f64>,
}

impl Counted {
    pub(super) fn add(&mut self, Self { score, in_flight, restarts, sequences, .. }: Self) {
        self.score = self.score.plus(score);
        self.in_flight += in_flight;
        self.restarts = self.restarts.into_iter().chain(restarts).reduce(|a, b| a + b);
        self.sequences = self.sequences.into_iter().chain(sequences).reduce(Tally::plus);
    }

    /// The required request count (T17), `(pn - m) / (1 - p)`, of what was counted on this node.
    pub(super) fn required(&self, slo: &Slo) -> f64 {
        let (m, n) = (self.score.in_time as f64, self.score.scored as f64);
        (slo.percentile * n - m) / (1.0 - slo.percentile)
    }
}
