//! The measurements of a run: latencies in histograms, errors by kind.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use millrace_client::LatencyBreakdown;

use crate::load::sequence::SequenceCounts;

/// The longest time that a histogram distinguishes.
const LONGEST: Duration = Duration::from_secs(3600);
/// The number of significant digits of a time.
const DIGITS: u8 = 3;

/// A successful response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LoadResponse {
    /// The size of the message or body.
    pub(super) bytes: usize,
    /// The latency breakdown, if the server reports a breakdown.
    pub(super) split: Option<LatencyBreakdown>,
}

/// The failure of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    /// The kind under which the failure is counted.
    pub(super) kind: String,
    /// The message of the failure.
    pub(super) example: String,
}

impl Problem {
    pub(super) fn new(kind: impl Into<String>, example: impl ToString) -> Self {
        Self { kind: kind.into(), example: example.to_string() }
    }
}

/// A histogram of times in nanoseconds.
#[derive(Debug, Clone)]
pub(super) struct TimeHistogram(Histogram<u64>);

impl TimeHistogram {
    fn new() -> Self {
        let longest = u64::try_from(LONGEST.as_nanos()).unwrap_or(u64::MAX);
        Self(Histogram::new_with_bounds(1, longest, DIGITS).expect("the bounds are constant and in order"))
    }

    pub(super) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns the time that this share of all times, from 0 to 1, did not exceed.
    pub(super) fn quantile(&self, share: f64) -> Duration {
        // The histogram returns the end of a bucket, which can exceed the longest recorded time.
        Duration::from_nanos(self.0.value_at_quantile(share).min(self.0.max()))
    }

    pub(super) fn mean(&self) -> Duration {
        Duration::from_nanos(self.0.mean() as u64)
    }

    pub(super) fn deviation(&self) -> Duration {
        Duration::from_nanos(self.0.stdev() as u64)
    }

    pub(super) fn min(&self) -> Duration {
        Duration::from_nanos(if self.0.is_empty() { 0 } else { self.0.min() })
    }

    pub(super) fn max(&self) -> Duration {
        Duration::from_nanos(self.0.max())
    }
}

/// The server's latency breakdown of the answered requests.
#[derive(Debug, Clone)]
pub(super) struct ServerHistograms {
    pub(super) queue: TimeHistogram,
    pub(super) swap: TimeHistogram,
    pub(super) run: TimeHistogram,
    /// The wait for SMs of a shared GPU.
    pub(super) token: TimeHistogram,
    pub(super) total: TimeHistogram,
    /// The client's latency without the model's run.
    pub(super) added: TimeHistogram,
}

/// The measurements of one run.
#[derive(Debug, Clone)]
pub(super) struct LoadStats {
    pub(super) latency: TimeHistogram,
    /// The delay between a request's planned and actual send time, caused by the generator. Open
    /// loop only.
    pub(super) lag: TimeHistogram,
    /// The server's breakdown. `None` until a response has a breakdown.
    pub(super) server: Option<Box<ServerHistograms>>,
    /// The count of each kind of failure, and the first message.
    pub(super) problems: BTreeMap<String, (u64, String)>,
    pub(super) answer_bytes: u64,
    /// The ended sequences, if the requests belonged to sequences.
    pub(super) sequences: SequenceCounts,
    /// The time from the start to the last response.
    pub(super) elapsed: Duration,
    /// The processor time that this process used during the run.
    pub(super) cpu: Duration,
}

impl LoadStats {
    pub(super) fn new() -> Self {
        Self {
            latency: TimeHistogram::new(),
            lag: TimeHistogram::new(),
            server: None,
            problems: BTreeMap::new(),
            answer_bytes: 0,
            sequences: SequenceCounts::default(),
            elapsed: Duration::ZERO,
            cpu: Duration::ZERO,
        }
    }

    /// Records the outcome of a request.
    pub(super) fn record(&mut self, latency: Duration, outcome: Result<LoadResponse, Problem>) {
        match outcome {
            Ok(answer) => {
                self.latency.record(latency);
                self.answer_bytes += answer.bytes as u64;
                if let Some(split) = answer.split {
                    self.server
                        .get_or_insert_with(|| Box::new(ServerHistograms::new()))
                        .record(latency, &split);
                }
            }
            Err(problem) => {
                self.problems.entry(problem.kind).or_insert_with(|| (0, problem.example)).0 += 1;
            }
        }
    }

    pub(super) fn failed(&self) -> u64 {
        self.problems.values().map(|(count, _)| count).sum()
    }

    /// Returns the successful responses per second.
    pub(super) fn throughput(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.latency.count() as f64 / seconds } else { 0.0 }
    }
}

impl ServerHistograms {
    fn new() -> Self {
        let [queue, swap, run, token, total, added] = std::array::from_fn(|_| TimeHistogram::new());
        Self { queue, swap, run, token, total, added }
    }

    fn record(&mut self, latency: Duration, split: &LatencyBreakdown) {
        self.queue.record(split.queue);
        self.swap.record(split.swap);
        self.run.record(split.run);
        self.token.record(split.token);
        self.total.record(split.total);
        self.added.record(latency.saturating_sub(split.run));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Returns whether two times are equal within the histogram's resolution.
    fn close(time: Duration, expected: Duration) -> bool {
        time.abs_diff(expected) <= expected / 1000
    }

    #[test]
    fn percentiles_match_the_recorded_times() {
        let mut stats = LoadStats::new();
        for millis in 1..=1000 {
            stats.record(ms(millis), Ok(LoadResponse { bytes: 10, split: None }));
        }
        stats.elapsed = Duration::from_secs(2);
        for (share, expected) in [(0.5, 500), (0.9, 900), (0.99, 990), (0.999, 999), (1.0, 1000)] {
            assert!(close(stats.latency.quantile(share), ms(expected)), "{share}");
        }
        assert!(close(stats.latency.max(), ms(1000)) && close(stats.latency.min(), ms(1)));
        assert!(close(stats.latency.mean(), Duration::from_micros(500_500)));
        assert_eq!((stats.answer_bytes, stats.throughput()), (10_000, 500.0));
    }

    #[test]
    fn failures_are_counted_by_kind_and_excluded_from_the_latencies() {
        let mut stats = LoadStats::new();
        for example in ["first", "second"] {
            stats.record(ms(1), Err(Problem::new("UNAVAILABLE", example)));
        }
        stats.record(ms(1), Err(Problem::new("timed out", "x")));
        assert_eq!(stats.problems["UNAVAILABLE"], (2, "first".to_owned()));
        assert_eq!((stats.failed(), stats.latency.count()), (3, 0));
        assert_eq!(stats.latency.quantile(0.5), Duration::ZERO);
    }

    #[test]
    fn added_latency_excludes_the_run() {
        let mut stats = LoadStats::new();
        let split = LatencyBreakdown { run: ms(2), total: ms(3), ..LatencyBreakdown::default() };
        stats.record(ms(5), Ok(LoadResponse { bytes: 0, split: Some(split) }));
        assert!(close(stats.server.unwrap().added.max(), ms(3)));
    }

    #[test]
    fn a_time_beyond_the_longest_is_recorded_as_the_longest() {
        let mut times = TimeHistogram::new();
        times.record(Duration::from_secs(86_400));
        assert!(close(times.max(), LONGEST));
    }
}
