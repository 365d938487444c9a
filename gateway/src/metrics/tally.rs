//! The tally of a revision: its statistics, as the protocol reports them, its SLO counts if the
//! gateway counts them, and the metrics of its function. The labels are chosen elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use millrace_types::{Reason, Slo, SloCounts};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::histogram::Histogram;

use super::labels::FunctionLabels;
use super::latencies::Latencies;
use crate::backend::AnswerTimes;

/// The counts of a revision since this gateway opened.
#[derive(Debug)]
pub(crate) struct RevisionCounts {
    pub(crate) success: Cumulative,
    pub(crate) fail: Cumulative,
    pub(crate) queue: Cumulative,
    pub(crate) swap: Cumulative,
    pub(crate) run: Cumulative,
    pub(crate) output: Cumulative,
    /// Time of the last inference in milliseconds since 1970; 0 before the first inference.
    pub(crate) last_inference_ms: AtomicU64,
    /// Latencies of the answered requests.
    pub(crate) latencies: Latencies,
    /// SLO counts; `None` if the gateway does not count them.
    score: Option<SloCounter>,
    pub(super) labels: FunctionLabels,
    series: FunctionMetrics,
}

/// A sum of squared times.
pub(super) type SquaredSeconds = Counter<f64, AtomicU64>;

/// The metrics of a tally's function.
#[derive(Debug)]
pub(super) struct FunctionMetrics {
    pub(super) answered: Counter,
    pub(super) total_seconds: TracedHistogram,
    pub(super) squared_seconds: SquaredSeconds,
    pub(super) queue_seconds: Histogram,
    pub(super) swap_seconds: Histogram,
    pub(super) cold_seconds: Histogram,
    pub(super) run_seconds: Histogram,
    pub(super) token_seconds: Histogram,
}

/// The times of an answered request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestTimes {
    pub(crate) split: AnswerTimes,
    /// Time from the backend's response to the client's response.
    pub(crate) output: Duration,
    /// Time from the request's arrival to the response.
    pub(crate) total: Duration,
}

impl RevisionCounts {
    /// Creates an empty tally with these labels.
    pub(super) fn new(labels: FunctionLabels, score: Option<SloCounter>, series: FunctionMetrics) -> Self {
        Self {
            success: Cumulative::default(),
            fail: Cumulative::default(),
            queue: Cumulative::default(),
            swap: Cumulative::default(),
            run: Cumulative::default(),
            output: Cumulative::default(),
            last_inference_ms: AtomicU64::new(0),
            latencies: Latencies::default(),
            score,
            labels,
            series,
        }
    }

    /// Counts an answered request. `trace_id` is set if the request is traced.
    pub(crate) fn answered(&self, times: &RequestTimes, unix_ms: u64, trace_id: Option<String>) {
        let AnswerTimes { cold, queue, swap, run, token } = times.split;
        self.success.add(times.total);
        if let Some(score) = &self.score {
            score.count(times.total <= score.objective.deadline);
        }
        self.latencies.add(times.total);
        self.queue.add(queue);
        self.swap.add(swap);
        self.run.add(run);
        self.output.add(times.output);
        self.last_inference_ms.fetch_max(unix_ms, Ordering::Relaxed);
        self.series.answered.inc();
        let exemplar = trace_id.map(|trace_id| Exemplar { trace_id });
        let at = exemplar.is_some().then(|| SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms));
        self.series.total_seconds.observe(times.total.as_secs_f64(), exemplar, at);
        self.series.squared_seconds.inc_by(times.total.as_secs_f64().powi(2));
        self.series.queue_seconds.observe(queue.as_secs_f64());
        self.series.swap_seconds.observe(swap.as_secs_f64());
        if cold > Duration::ZERO {
            self.series.cold_seconds.observe(cold.as_secs_f64());
        }
        self.series.run_seconds.observe(run.as_secs_f64());
        if token > Duration::ZERO {
            self.series.token_seconds.observe(token.as_secs_f64());
        }
    }

    /// Counts a request without a response. For the SLO, an expired request counts as late, and a
    /// request that failed or was cancelled does not count. Workers count requests of functions in
    /// the same way.
    pub(super) fn failed(&self, reason: Reason, took: Duration) {
        self.fail.add(took);
        if let Some(score) = self.score.as_ref().filter(|_| reason == Reason::TimedOut) {
            score.count(false);
        }
    }

    /// Returns the objective against which the gateway counts requests.
    pub(super) fn objective(&self) -> Option<Slo> {
        self.score.as_ref().map(|score| score.objective)
    }

    /// Returns the SLO counts, which are zero for a model that workers count.
    pub(crate) fn score(&self) -> SloCounts {
        self.score.as_ref().map(|score| score.counts.read()).unwrap_or_default()
    }
}

/// The number of occurrences, and the total time.
#[derive(Debug, Default)]
pub(crate) struct Cumulative {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Cumulative {
    fn add(&self, span: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the count and the total time in nanoseconds.
    pub(crate) fn read(&self) -> (u64, u64) {
        (self.count.load(Ordering::Relaxed), self.nanos.load(Ordering::Relaxed))
    }
}

/// SLO counts against an objective (T17), with metrics.
#[derive(Debug)]
pub(super) struct SloCounter {
    objective: Slo,
    counts: SharedCounts,
    scored_total: Counter,
    in_time_total: Counter,
}

impl SloCounter {
    /// Creates zero counts.
    pub(super) fn new(objective: Slo, scored_total: Counter, in_time_total: Counter) -> Self {
        Self { objective, counts: SharedCounts::default(), scored_total, in_time_total }
    }

    fn count(&self, in_time: bool) {
        self.counts.count(in_time);
        self.scored_total.inc();
        if in_time {
            self.in_time_total.inc();
        }
    }
}

/// The trace of a request in a histogram bucket, which shows why the request was slow.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Exemplar {
    trace_id: String,
}

/// SLO counts that several threads update concurrently.
#[derive(Debug, Default)]
struct SharedCounts {
    m: AtomicU64,
    n: AtomicU64,
}

impl SharedCounts {
    fn count(&self, in_time: bool) {
        // In this order, so that a reader hardly ever sees more requests within the deadline than
        // requests in total.
        self.n.fetch_add(1, Ordering::Relaxed);
        self.m.fetch_add(u64::from(in_time), Ordering::Relaxed);
    }

    fn read(&self) -> SloCounts {
        let m = self.m.load(Ordering::Relaxed);
        SloCounts { m, n: self.n.load(Ordering::Relaxed).max(m) }
    }
}

/// A latency histogram with the last traced request of each bucket.
pub(super) type TracedHistogram = HistogramWithExemplars<Exemplar>;
