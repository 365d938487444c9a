//! Runs scenarios for every seed, as many at once as there are processors: each has a thread and a
//! virtual time of its own.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use millrace_sim::{Outcome, Scenario, Summary};

use crate::figures::Spread;

/// Runs scenarios and takes from each outcome what is wanted, in their order.
///
/// # Errors
/// As of the first that was not run.
pub fn each<T: Send>(
    scenarios: &[Scenario],
    take: impl Fn(&Scenario, &Outcome) -> T + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new((0..scenarios.len()).map(|_| None).collect::<Vec<_>>());
    let work = || {
        while let Some(place) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&it| it < scenarios.len())
        {
            let scenario = &scenarios[place];
            let result = millrace_sim::run(scenario).map(|outcome| take(scenario, &outcome));
            // Whoever panicked under the lock ended this scope already.
            if let Ok(mut results) = results.lock() {
                results[place] = Some(result);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(scenarios.len().max(1));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let all = results.into_iter().map(|result| result.context("a scenario was not run")?.map_err(Into::into));
    all.collect()
}

/// The summaries of one setup, by seed.
#[derive(Debug, Clone, Default)]
pub struct Summaries(pub Vec<Summary>);

impl Summaries {
    /// Runs a setup with each seed from 1.
    ///
    /// # Errors
    /// As [`each`].
    pub fn of(seeds: u64, setup: impl Fn(u64) -> Scenario) -> Result<Self> {
        let scenarios: Vec<_> = (1..=seeds).map(setup).collect();
        Ok(Self(each(&scenarios, |scenario, outcome| outcome.summary(&scenario.functions))?))
    }

    /// One quantity.
    #[must_use]
    pub fn spread(&self, of: impl Fn(&Summary) -> f64) -> Spread {
        Spread(self.0.iter().map(of).collect())
    }

    /// Mean latency in milliseconds.
    #[must_use]
    pub fn mean_ms(&self) -> Spread {
        self.spread(|summary| summary.mean.as_secs_f64() * 1e3)
    }
}
