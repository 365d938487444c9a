//! The workload of a simulation, parsed from options.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_sim::workload::{MINUTE, RequestArrival, apportion, azure, minutes, rates, zipf};

use crate::failure::CommandFailure;

/// The workload of a simulation.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Workload")]
pub(super) struct Workload {
    /// A day's file of the Azure Functions trace of 2019; its most popular functions are used.
    #[arg(long, value_name = "FILE", group = "shape")]
    trace: Option<PathBuf>,
    /// A file of requests by function and minute: a CSV without a header, one function per line.
    #[arg(long, value_name = "FILE", group = "shape")]
    rates: Option<PathBuf>,
    /// A generated shape [default: the rates of the Torpor paper's functions].
    #[arg(long, value_enum, value_name = "SHAPE", group = "shape")]
    pattern: Option<WorkloadShape>,
    /// The requests per minute of all functions together [default: as many as the file has, or
    /// 1000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    rate: Option<u32>,
    /// The length of the workload in minutes.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1440))]
    minutes: u32,
    /// With --pattern zipf: the share of all requests that go to the most popular functions.
    #[arg(long, value_name = "SHARE", default_value_t = 0.56)]
    top_share: f64,
    /// With --pattern zipf: the number of the most popular functions.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
}

/// A generated shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WorkloadShape {
    /// Popularity by Zipf's law, requests at random times.
    Zipf,
    /// Equal popularity, requests at independent random times.
    Sporadic,
    /// Equal popularity, requests of each function at a fixed period.
    Periodic,
    /// Equal popularity, requests in bursts of ten.
    Bursty,
}

/// The default number of requests per minute.
const RATE: u32 = 1000;
/// The number of requests in a burst.
const BURST: u32 = 10;
/// The time between two requests of a burst.
const APART: Duration = Duration::from_millis(5);
/// The jitter of a periodic request, as a share of its period.
const JITTER: f64 = 0.05;

impl Workload {
    /// Returns the length of the workload.
    pub(super) fn span(&self) -> Duration {
        MINUTE * self.minutes
    }

    /// Returns the number of functions with requests, and the requests. Each function's number of
    /// requests is multiplied by its factor in `times`.
    pub(super) fn arrivals(
        &self,
        times: &[u32],
        seed: u64,
    ) -> Result<(usize, Vec<RequestArrival>), CommandFailure> {
        let functions = times.len();
        if !(self.top_share > 0.0 && self.top_share < 1.0) {
            return Err(CommandFailure::usage(
                "--top-share is out of range: write a number between 0 and 1, both excluded",
            ));
        }
        let (asked, arrivals) = match self.pattern {
            Some(shape) if shape != WorkloadShape::Zipf => (functions, self.generated(shape, times, seed)),
            _ => {
                let mut counts = self.counts(functions)?;
                for minute in &mut counts {
                    minute.iter_mut().zip(times).for_each(|(count, times)| *count *= times);
                }
                (counts.iter().map(Vec::len).max().unwrap_or(0), minutes::arrivals(&counts, seed))
            }
        };
        if arrivals.is_empty() {
            return Err(CommandFailure::usage(
                "the workload has no requests: increase --minutes or --functions",
            ));
        }
        Ok((asked, arrivals))
    }

    /// Returns the requests by minute and function.
    fn counts(&self, functions: usize) -> Result<Vec<Vec<u32>>, CommandFailure> {
        let minutes = self.minutes as usize;
        let open = |path: &PathBuf| {
            File::open(path)
                .map_err(|error| CommandFailure::usage(format!("cannot read {}: {error}", path.display())))
        };
        let wrong = |path: &PathBuf| {
            let path = path.display().to_string();
            move |error: azure::Error| CommandFailure::usage(format!("{path}: {error}"))
        };
        let counts = match (&self.trace, &self.rates, self.pattern) {
            (Some(path), ..) => azure::read(open(path)?, minutes, functions).map_err(wrong(path))?,
            (_, Some(path), _) => {
                let rates = rates::read(open(path)?).map_err(wrong(path))?;
                if rates.is_empty() {
                    return Err(CommandFailure::usage(format!(
                        "{}: the file has no functions",
                        path.display()
                    )));
                }
                rates::by_minute(&rates, functions, minutes, 0)
            }
            (None, None, Some(_)) => {
                let shares =
                    zipf::shares(functions, zipf::exponent(functions, self.top as usize, self.top_share));
                vec![apportion(self.rate.unwrap_or(RATE), &shares); minutes]
            }
            (None, None, None) => rates::by_minute(&rates::torpor(), functions, minutes, 0),
        };
        Ok(match self.rate {
            Some(rate) => azure::normalise(&counts, rate),
            None => counts,
        })
    }

    fn generated(&self, shape: WorkloadShape, times: &[u32], seed: u64) -> Vec<RequestArrival> {
        let rate = f64::from(self.rate.unwrap_or(RATE)) / times.len() as f64;
        let pattern = |times: &u32| {
            let gap = MINUTE.div_f64(rate) / *times;
            match shape {
                WorkloadShape::Zipf | WorkloadShape::Sporadic => WorkloadPattern::Sporadic { mean_gap: gap },
                WorkloadShape::Periodic => WorkloadPattern::Periodic { period: gap, jitter: JITTER },
                WorkloadShape::Bursty => {
                    WorkloadPattern::Bursty { mean_gap: gap * BURST, size: BURST, apart: APART }
                }
            }
        };
        patterns::arrivals(&times.iter().map(pattern).collect::<Vec<_>>(), self.span(), seed)
    }
}
