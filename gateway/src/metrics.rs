//! The counts: each model's statistics, as the protocol reports them, and the metrics for Prometheus.
//! A tally per revision has both, so that a request looks them up only once. This module has the
//! names of the metrics, and the labels, whose number is bounded.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use millrace_types::{FunctionKey, Reason, RevisionKey, Slo};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::backend::ModelRevision;

pub(crate) use self::tally::{Cumulative, RequestTimes, RevisionCounts};

use self::labels::{FunctionLabels, OutcomeLabels, WorkflowLabels};
use self::tally::{FunctionMetrics, SloCounter, SquaredSeconds, TracedHistogram};

mod labels;
pub(crate) mod latencies;
mod tally;

/// Label of functions without a label of their own.
const OTHER: &str = "_other";
/// Value of the label `reason` for answered requests.
const OK: &str = "OK";

/// The tallies of all revisions that were invoked.
pub(crate) type Tallies = Arc<RwLock<HashMap<RevisionKey, Arc<RevisionCounts>>>>;

/// All tallies, and the metrics that belong to no single function.
#[derive(Debug)]
pub(crate) struct RequestMetrics {
    tallies: Tallies,
    labelled: Mutex<BTreeSet<FunctionKey>>,
    labelled_max: usize,
    outcomes: Family<OutcomeLabels, Counter>,
    total_seconds: Family<FunctionLabels, TracedHistogram, fn() -> TracedHistogram>,
    /// Sum of the squared times, from which the variance follows (L17).
    squared_seconds: Family<FunctionLabels, SquaredSeconds>,
    queue_seconds: Family<FunctionLabels, Histogram, fn() -> Histogram>,
    swap_seconds: Family<FunctionLabels, Histogram, fn() -> Histogram>,
    /// Only of requests with a cold start, so that the histogram's count is the number of cold starts.
    cold_seconds: Family<FunctionLabels, Histogram, fn() -> Histogram>,
    run_seconds: Family<FunctionLabels, Histogram, fn() -> Histogram>,
    /// Only of requests that waited for SMs of a shared GPU while they ran.
    token_seconds: Family<FunctionLabels, Histogram, fn() -> Histogram>,
    /// Requests of workflows with an objective: those that count towards the objective, and those
    /// within the deadline.
    scored: Family<WorkflowLabels, Counter>,
    in_time: Family<WorkflowLabels, Counter>,
    /// Number of inference requests in progress.
    pub(crate) in_flight: Gauge,
    /// Number of open connections.
    pub(crate) connections: Gauge,
    /// Bytes of inference requests and responses in memory, set at each scrape.
    pub(crate) bytes_in_flight: Gauge,
    /// Number of requests that wait until the model is ready, set at each scrape.
    pub(crate) waiting: Gauge,
}

/// Returns the buckets of the histograms, from 50 µs to 26 s.
fn buckets() -> impl Iterator<Item = f64> {
    exponential_buckets(50e-6, 2.0, 20)
}

fn seconds() -> Histogram {
    Histogram::new(buckets())
}

fn traced() -> TracedHistogram {
    TracedHistogram::new(buckets())
}

impl RequestMetrics {
    pub(crate) fn new(
        registry: &mut Registry,
        tallies: Tallies,
        labelled_max: usize,
        bytes_in_flight_max: u64,
    ) -> Self {
        let family = || Family::new_with_constructor(seconds as fn() -> Histogram);
        let meters = Self {
            tallies,
            labelled: Mutex::default(),
            labelled_max,
            outcomes: Family::default(),
            total_seconds: Family::new_with_constructor(traced as fn() -> TracedHistogram),
            squared_seconds: Family::default(),
            queue_seconds: family(),
            swap_seconds: family(),
            cold_seconds: family(),
            run_seconds: family(),
            token_seconds: family(),
            scored: Family::default(),
            in_time: Family::default(),
            in_flight: Gauge::default(),
            connections: Gauge::default(),
            bytes_in_flight: Gauge::default(),
            waiting: Gauge::default(),
        };
        registry.register(
            "millrace_requests",
            "Finished inference requests, by reason; OK if answered",
            meters.outcomes.clone(),
        );
        registry.register_with_unit(
            "millrace_request",
            "Time from a request's arrival to its response",
            Unit::Seconds,
            meters.total_seconds.clone(),
        );
        registry.register(
            "millrace_request_squared_seconds",
            "Sum of the squares of millrace_request_seconds, for the variance",
            meters.squared_seconds.clone(),
        );
        for (name, help, family) in [
            ("millrace_request_queue", "Time that requests wait for a GPU", &meters.queue_seconds),
            (
                "millrace_request_swap",
                "Time that requests wait for the copy of the model to the GPU",
                &meters.swap_seconds,
            ),
            (
                "millrace_request_cold_start",
                "Time of cold starts, in which requests wait for the model to be loaded into host memory",
                &meters.cold_seconds,
            ),
            ("millrace_request_run", "Time that models run", &meters.run_seconds),
            (
                "millrace_request_token",
                "Time that running requests wait for SMs of a shared GPU",
                &meters.token_seconds,
            ),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
        }
        registry.register(
            "millrace_workflow_slo_requests",
            "Requests of a workflow that count towards its objective",
            meters.scored.clone(),
        );
        registry.register(
            "millrace_workflow_slo_in_time",
            "Requests of a workflow that were answered within its objective",
            meters.in_time.clone(),
        );
        registry.register(
            "millrace_requests_in_flight",
            "Inference requests in progress",
            meters.in_flight.clone(),
        );
        registry.register(
            "millrace_requests_waiting",
            "Inference requests that wait until their model is ready",
            meters.waiting.clone(),
        );
        registry.register("millrace_connections", "Open client connections", meters.connections.clone());
        registry.register_with_unit(
            "millrace_request_in_flight",
            "Bytes of received requests and of responses that are not sent yet",
            Unit::Bytes,
            meters.bytes_in_flight.clone(),
        );
        let budget: Gauge = Gauge::default();
        budget.set(i64::try_from(bytes_in_flight_max).unwrap_or(i64::MAX));
        registry.register_with_unit(
            "millrace_request_in_flight_max",
            "Limit of the bytes of requests and responses in memory",
            Unit::Bytes,
            budget,
        );
        meters
    }

    /// Returns the tally of a model, created on first use. A workflow gets a new tally if the tally
    /// of its number has another objective: once the name of a deleted workflow is forgotten, its
    /// revision numbers are used again.
    pub(crate) fn tally(
        &self,
        model: &ModelRevision,
        still_there: impl Fn(&FunctionKey) -> bool,
    ) -> Arc<RevisionCounts> {
        let key = RevisionKey { function: model.key.clone(), revision: model.revision };
        let is_of = |tally: &Arc<RevisionCounts>| tally.objective() == model.objective;
        if let Some(tally) = self.find(&key).filter(is_of) {
            return tally;
        }
        let mut tallies = self.tallies.write().unwrap_or_else(PoisonError::into_inner);
        if tallies.len() >= 4 * self.labelled_max {
            tallies.retain(|key, _| still_there(&key.function));
            self.forget_labels(still_there);
        }
        let known = tallies.get(&key).filter(|tally| is_of(tally)).cloned();
        known.unwrap_or_else(|| {
            let tally = Arc::new(self.new_tally(self.labels(&model.key), model.objective));
            tallies.insert(key, Arc::clone(&tally));
            tally
        })
    }

    /// Returns the tally of a revision that has been invoked.
    pub(crate) fn find(&self, key: &RevisionKey) -> Option<Arc<RevisionCounts>> {
        self.tallies.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Counts a request without a response. `tally` is set if the request's model was found.
    pub(crate) fn failed(&self, tally: Option<&RevisionCounts>, reason: Reason, took: Duration) {
        let labels = match tally {
            Some(tally) => {
                tally.failed(reason, took);
                tally.labels.clone()
            }
            None => FunctionLabels { tenant: String::new(), function: String::new() },
        };
        let FunctionLabels { tenant, function } = labels;
        self.outcomes.get_or_create(&OutcomeLabels { tenant, function, reason: reason.as_str() }).inc();
    }

    fn labels(&self, key: &FunctionKey) -> FunctionLabels {
        let mut labelled = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        let own =
            labelled.contains(key) || (labelled.len() < self.labelled_max && labelled.insert(key.clone()));
        match own {
            true => FunctionLabels { tenant: key.tenant.to_string(), function: key.name.to_string() },
            false => FunctionLabels { tenant: OTHER.to_owned(), function: OTHER.to_owned() },
        }
    }

    fn new_tally(&self, labels: FunctionLabels, objective: Option<Slo>) -> RevisionCounts {
        let FunctionLabels { tenant, function } = labels.clone();
        let score = objective.map(|objective| {
            let labels = WorkflowLabels { tenant: tenant.clone(), workflow: function.clone() };
            let scored = self.scored.get_or_create_owned(&labels);
            SloCounter::new(objective, scored, self.in_time.get_or_create_owned(&labels))
        });
        let answered = OutcomeLabels { tenant, function, reason: OK };
        let series = FunctionMetrics {
            answered: self.outcomes.get_or_create_owned(&answered),
            total_seconds: self.total_seconds.get_or_create_owned(&labels),
            squared_seconds: self.squared_seconds.get_or_create_owned(&labels),
            queue_seconds: self.queue_seconds.get_or_create_owned(&labels),
            swap_seconds: self.swap_seconds.get_or_create_owned(&labels),
            cold_seconds: self.cold_seconds.get_or_create_owned(&labels),
            run_seconds: self.run_seconds.get_or_create_owned(&labels),
            token_seconds: self.token_seconds.get_or_create_owned(&labels),
        };
        RevisionCounts::new(labels, score, series)
    }

    /// Removes the labels of deleted functions, together with the counts.
    fn forget_labels(&self, still_there: impl Fn(&FunctionKey) -> bool) {
        let mut labelled = self.labelled.lock().unwrap_or_else(PoisonError::into_inner);
        labelled.retain(|key| {
            if still_there(key) {
                return true;
            }
            let tenant = key.tenant.to_string();
            let function = key.name.to_string();
            for reason in std::iter::once(OK).chain(Reason::ALL.iter().map(|reason| reason.as_str())) {
                let tenant = tenant.clone();
                let function = function.clone();
                self.outcomes.remove(&OutcomeLabels { tenant, function, reason });
            }
            let workflow = WorkflowLabels { tenant: tenant.clone(), workflow: function.clone() };
            self.scored.remove(&workflow);
            self.in_time.remove(&workflow);
            let labels = FunctionLabels { tenant, function };
            self.total_seconds.remove(&labels);
            self.squared_seconds.remove(&labels);
            for family in [
                &self.queue_seconds,
                &self.swap_seconds,
                &self.run_seconds,
                &self.cold_seconds,
                &self.token_seconds,
            ] {
                family.remove(&labels);
            }
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Bytes, FunctionName, Revision, Runtime, SloCounts, TenantName};
    use prometheus_client::encoding::text::encode;

    use super::*;
    use crate::backend::{AnswerTimes, Kind, ModelAvailability};

    fn model(name: &str) -> ModelRevision {
        let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() };
        ModelRevision {
            key,
            revision: Revision::FIRST,
            revisions: vec![Revision::FIRST],
            kind: Kind::Function(Runtime::Onnx),
            inputs: Vec::new(),
            outputs: Vec::new(),
            timeout: Duration::from_secs(1),
            objective: None,
            idempotent: true,
            sequences: None,
            weights: Bytes(1),
            availability: ModelAvailability::Ready,
        }
    }

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        text
    }

    #[test]
    fn functions_beyond_the_bound_share_a_label_and_deleted_ones_free_theirs() {
        let mut registry = Registry::default();
        let meters = RequestMetrics::new(&mut registry, Tallies::default(), 2, 1);
        for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            meters.tally(&model(name), |_| true);
        }
        assert!(text(&registry).contains(r#"millrace_requests_total{tenant="_other",function="_other""#));
        assert!(!text(&registry).contains(r#"function="c""#));
        // All functions except "b" are deleted, so the next new function gets a label.
        meters.tally(&model("z"), |key| key.name.as_str() == "b");
        let text = text(&registry);
        assert!(text.contains(r#"function="z""#) && text.contains(r#"function="b""#));
        assert!(!text.contains(r#"function="a""#), "{text}");
    }

    /// L17: the variance of 100 ms and 300 ms is 0.01 s².
    #[test]
    fn the_variance_of_the_latency_follows_from_sums() {
        let mut registry = Registry::default();
        let meters = RequestMetrics::new(&mut registry, Tallies::default(), 2, 1);
        let tally = meters.tally(&model("f"), |_| true);
        for ms in [100, 300] {
            let total = Duration::from_millis(ms);
            let times = RequestTimes { split: AnswerTimes::default(), output: Duration::ZERO, total };
            tally.answered(&times, 99, None);
        }
        let text = text(&registry);
        let value = |metric: &str| -> f64 {
            let line = text.lines().find(|line| line.starts_with(&format!("{metric}{{"))).unwrap();
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        let count = value("millrace_request_seconds_count");
        let mean = value("millrace_request_seconds_sum") / count;
        let variance = value("millrace_request_squared_seconds_total") / count - mean * mean;
        assert!((variance - 0.01).abs() < 1e-9, "{variance}: {text}");
    }

    #[test]
    fn requests_of_a_workflow_are_counted_against_its_objective() {
        let mut registry = Registry::default();
        let meters = RequestMetrics::new(&mut registry, Tallies::default(), 2, 1);
        let ms = Duration::from_millis;
        let objective = Some(Slo { deadline: ms(10), percentile: 0.9 });
        let workflow = ModelRevision { kind: Kind::Workflow, objective, ..model("w") };
        let tally = meters.tally(&workflow, |_| true);
        let answered = |tally: &RevisionCounts, total| {
            tally.answered(&RequestTimes { split: AnswerTimes::default(), output: ms(0), total }, 99, None);
        };
        answered(&tally, ms(10));
        answered(&tally, ms(11));
        for reason in [Reason::TimedOut, Reason::Cancelled, Reason::DataLost] {
            meters.failed(Some(&tally), reason, ms(5));
        }
        assert_eq!(tally.score(), SloCounts { m: 1, n: 3 }, "failed and cancelled requests do not count");
        // The next version has its own SLO counts, but adds to the same metrics.
        let next = ModelRevision { revision: Revision::new(2).unwrap(), ..workflow };
        answered(&meters.tally(&next, |_| true), ms(1));
        assert_eq!(meters.tally(&next, |_| true).score(), SloCounts { m: 1, n: 1 });
        let text = text(&registry);
        for line in [
            r#"millrace_workflow_slo_requests_total{tenant="default",workflow="w"} 4"#,
            r#"millrace_workflow_slo_in_time_total{tenant="default",workflow="w"} 2"#,
        ] {
            assert!(text.contains(line), "{text}");
        }
        let function = meters.tally(&model("f"), |_| true);
        answered(&function, ms(1));
        assert_eq!(function.score(), SloCounts::default(), "the workers of a function count its SLO");
    }

    #[test]
    fn a_reused_revision_number_is_counted_against_the_current_objective() {
        let mut registry = Registry::default();
        let meters = RequestMetrics::new(&mut registry, Tallies::default(), 2, 1);
        let ms = Duration::from_millis;
        let score = |deadline| {
            let objective = Some(Slo { deadline, percentile: 0.9 });
            let tally =
                meters.tally(&ModelRevision { kind: Kind::Workflow, objective, ..model("w") }, |_| true);
            tally.answered(
                &RequestTimes { split: AnswerTimes::default(), output: ms(0), total: ms(15) },
                99,
                None,
            );
            tally.score()
        };
        assert_eq!(score(ms(10)), SloCounts { m: 0, n: 1 });
        assert_eq!(score(ms(10)), SloCounts { m: 0, n: 2 });
        assert_eq!(score(ms(20)), SloCounts { m: 1, n: 1 });
    }

    #[test]
    fn times_of_answered_and_failed_requests_are_counted() {
        let mut registry = Registry::default();
        let meters = RequestMetrics::new(&mut registry, Tallies::default(), 2, 1);
        let tally = meters.tally(&model("a"), |_| true);
        let ms = Duration::from_millis;
        let split = AnswerTimes { cold: ms(0), queue: ms(1), swap: ms(2), run: ms(3), token: ms(0) };
        tally.answered(&RequestTimes { split, output: ms(0), total: ms(7) }, 99, None);
        let cold = |text: &str, count| {
            text.contains(&format!(r#"cold_start_seconds_count{{tenant="default",function="a"}} {count}"#))
        };
        assert!(cold(&text(&registry), 0), "a swap is not a cold start");
        let token = |text: &str, sum: &str| {
            text.contains(&format!(r#"request_token_seconds_sum{{tenant="default",function="a"}} {sum}"#))
        };
        assert!(token(&text(&registry), "0.0"));
        meters.failed(Some(&tally), Reason::TimedOut, ms(5));
        assert_eq!(tally.success.read(), (1, 7_000_000));
        tally.answered(
            &RequestTimes {
                split: AnswerTimes { cold: ms(9), token: ms(4), ..split },
                output: ms(0),
                total: ms(16),
            },
            99,
            Some("5ca1ab1e".into()),
        );
        assert!(cold(&text(&registry), 1));
        assert!(token(&text(&registry), "0.004"));
        let traced = r#"request_seconds_bucket{le="0.0256",tenant="default",function="a"} 2 # {trace_id="5ca1ab1e"} 0.016 0.099"#;
        assert!(text(&registry).contains(traced), "{}", text(&registry));
        assert_eq!(tally.fail.read(), (1, 5_000_000));
        assert_eq!(tally.swap.read(), (2, 4_000_000));
        assert!(
            text(&registry)
                .contains(r#"millrace_requests_total{tenant="default",function="a",reason="TIMED_OUT"} 1"#)
        );
    }
}
