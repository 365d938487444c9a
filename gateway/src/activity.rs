//! The counts of each function that a gateway collects, for tools that show them live.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use millrace_types::{FunctionKey, SloCounts};

use crate::metrics::Tallies;
use crate::metrics::latencies::{BUCKETS, end};

/// A handle to read the counts of a gateway. Clones read the same counts.
#[derive(Debug, Clone, Default)]
pub struct Activity(pub(crate) Tallies);

/// The counts of a function since the gateway opened, summed over its revisions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FunctionActivity {
    /// Number of answered requests.
    pub answered: u64,
    /// Number of requests that ended otherwise, including requests that their client cancelled.
    pub failed: u64,
    /// SLO counts of a workflow. Zero for a function, because its workers count.
    pub score: SloCounts,
    /// Latencies of the answered requests: the upper end of each bucket in seconds, and the number of
    /// requests in the bucket. Ascending, without empty buckets.
    pub latencies: Vec<(f64, u64)>,
}

impl Activity {
    /// Returns the counts of every function that was invoked.
    #[must_use]
    pub fn functions(&self) -> BTreeMap<FunctionKey, FunctionActivity> {
        let mut functions: BTreeMap<FunctionKey, (FunctionActivity, [u64; BUCKETS])> = BTreeMap::new();
        for (key, tally) in self.0.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let none = || (FunctionActivity::default(), [0; BUCKETS]);
            let (counted, latencies) = functions.entry(key.function.clone()).or_insert_with(none);
            counted.answered += tally.success.read().0;
            counted.failed += tally.fail.read().0;
            counted.score = counted.score.plus(tally.score());
            tally.latencies.add_to(latencies);
        }
        let told = |counts: [u64; BUCKETS]| {
            let ends = (0..).map(end).zip(counts);
            ends.filter(|&(_, count)| count > 0).collect()
        };
        let functions = functions.into_iter();
        functions
            .map(|(key, (counted, counts))| (key, FunctionActivity { latencies: told(counts), ..counted }))
            .collect()
    }
}
