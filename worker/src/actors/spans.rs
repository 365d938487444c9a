//! The part of a request's trace that its GPU produces: the swap of its model with the copies, and the run
//! with its launches. Attributes are built only for spans that are recorded.

use std::fmt::Display;
use std::time::Duration;

use millrace_core::ids::{RunId, TransferId};
use millrace_proto::executor::LaunchTimes;
use millrace_proto::trace::{self, FinishedSpan, KeyValue};
use millrace_proto::worker::FetchMethod;
use millrace_transfers::fabric::WeightsCargo;
use millrace_transfers::paths::{HostDirection, RouteHops};
use millrace_types::{GpuIndex, Timestamp};
use tracing::Span;

use crate::messages::gpu::CopiedBatch;
use crate::objects::method_name;

/// Shortest wait for a token that has a span. A launch under a token that is there passes in microseconds.
const TOKEN_WAIT_SHOWN_MIN: Duration = Duration::from_micros(50);

/// The spans of a request while the request is on a GPU.
pub(crate) struct GpuSpans {
    parent: Span,
    gpu: GpuIndex,
    swap: Option<(TransferId, Span)>,
    run: Option<(RunId, Span)>,
}

impl GpuSpans {
    /// Returns a request's spans on a GPU, as children of `parent`.
    pub(crate) fn new(parent: Span, gpu: GpuIndex) -> Self {
        Self { parent, gpu, swap: None, run: None }
    }

    /// Starts the swap span: the request's model is being copied. `evicted` models made room for the copy.
    pub(crate) fn swap_begins(
        &mut self,
        transfer: TransferId,
        weights: WeightsCargo,
        from: Option<GpuIndex>,
        evicted: usize,
    ) {
        let source = || from.map_or_else(|| "host".to_owned(), |peer| format!("gpu {}", peer.0));
        let span = tracing::info_span!(
            parent: &self.parent,
            "swap",
            millrace.gpu = self.gpu.0,
            millrace.source = source(),
            millrace.bytes = weights.bytes.get(),
        );
        if evicted > 0 {
            let evicted = i64::try_from(evicted).unwrap_or(i64::MAX);
            trace::add_event(&span, "made room", || vec![KeyValue::new("millrace.evicted.models", evicted)]);
        }
        self.swap = Some((transfer, span));
    }

    /// Whether the request's model is being copied.
    pub(crate) fn swapping(&self) -> bool {
        self.swap.is_some()
    }

    /// Whether this transfer copies the request's model.
    pub(crate) fn swaps_by(&self, transfer: TransferId) -> bool {
        self.swap.as_ref().is_some_and(|(mine, _)| *mine == transfer)
    }

    /// Returns the spans that outlive the request: an open swap span. An executor may report the end of a
    /// run before the end of the copy that the run waited for.
    pub(crate) fn into_unfinished(self) -> Option<Self> {
        self.swap.is_some().then_some(Self { run: None, ..self })
    }

    /// Ends the swap span: the model is resident.
    pub(crate) fn swap_ends(&mut self) {
        self.swap = None;
    }

    /// Records a copied batch in the swap span, if the batch belongs to the request's model.
    pub(crate) fn copied(&self, now: Timestamp, copied: &CopiedBatch) {
        if let Some((_, span)) = self.swap.as_ref().filter(|_| self.swaps_by(copied.transfer)) {
            self::copied(span, now, copied);
        }
    }

    /// Starts the run span: the executor gets a run of `requests` requests. Returns whether the executor
    /// should report the times of the run's launches, because the span is recorded.
    pub(crate) fn run_begins(&mut self, run: RunId, attempt: u32, requests: usize) -> bool {
        let span = tracing::info_span!(
            parent: &self.parent,
            "run",
            millrace.gpu = self.gpu.0,
            millrace.attempt = attempt,
            millrace.batch.requests = requests,
        );
        let looked_at = trace::is_recorded(&span);
        self.run = Some((run, span));
        looked_at
    }

    /// Records the fetch of an input that is an object, now that the input is available.
    pub(crate) fn fetched(
        &self,
        method: FetchMethod,
        routes: &[RouteHops],
        input: &str,
        bytes: u64,
        took: Duration,
    ) {
        trace::record_finished(&self.parent, "fetch", FinishedSpan { ago: Duration::ZERO, took }, || {
            let mut attributes = fetch_attributes(method, input, bytes);
            if !routes.is_empty() {
                let routes: Vec<_> = routes.iter().map(RouteHops::to_string).collect();
                attributes.push(KeyValue::new("millrace.fetch.routes", routes.join(", ")));
            }
            attributes
        });
    }

    /// Records the launches of a run with the times that the executor reported.
    pub(crate) fn launched(&self, now: Timestamp, run: RunId, times: &[LaunchTimes]) {
        let Some((_, span)) = self.run.as_ref().filter(|(mine, _)| *mine == run) else { return };
        for launch in times {
            let started = Timestamp(launch.started_ns);
            let held = Duration::from_nanos(launch.token_wait_ns);
            if held >= TOKEN_WAIT_SHOWN_MIN {
                let asked = Timestamp(launch.started_ns.saturating_sub(launch.token_wait_ns));
                trace::record_finished(span, "token", past(now, asked, started), || {
                    vec![KeyValue::new("millrace.launch", i64::from(launch.launch))]
                });
            }
            let past = past(now, started, Timestamp(launch.finished_ns));
            trace::record_finished(span, "launch", past, || {
                let number = KeyValue::new("millrace.launch", i64::from(launch.launch));
                let waited = KeyValue::new("millrace.waited_ms", launch.waited_ns as f64 / 1e6);
                let units = KeyValue::new("millrace.sm_units", i64::from(launch.sm_units));
                [number, waited].into_iter().chain((launch.sm_units > 0).then_some(units)).collect()
            });
        }
    }

    /// Notes in the run span that the Node recalled the request for another GPU.
    pub(crate) fn recalled(&self) {
        if let Some((_, span)) = &self.run {
            trace::add_event(span, "recalled for another GPU", Vec::new);
        }
    }

    /// Marks the open spans as failed: the request ends here without an answer.
    pub(crate) fn fail(&self, why: impl Display) {
        let spans = [&self.swap.as_ref().map(|(_, span)| span), &self.run.as_ref().map(|(_, span)| span)];
        spans.into_iter().flatten().for_each(|span| trace::fail(span, &why));
    }
}

/// Starts the span of the copy of a request's output from its GPU to the host.
pub(crate) fn host_copy_span(parent: &Span, gpu: GpuIndex, bytes: u64) -> Span {
    tracing::info_span!(parent: parent, "keep", millrace.gpu = gpu.0, millrace.bytes = bytes)
}

/// Records a copied batch as a child of the span of its transfer.
pub(crate) fn copied(span: &Span, now: Timestamp, copied: &CopiedBatch) {
    trace::record_finished(span, "copy", past(now, copied.started, copied.finished), || {
        let bytes = i64::try_from(copied.bytes.get()).unwrap_or(i64::MAX);
        let link = KeyValue::new("millrace.link", i64::from(copied.link.0));
        let mut attributes = vec![link, KeyValue::new("millrace.bytes", bytes)];
        let route = copied.via.map(|via| match via {
            (HostDirection::ToGpu, hops) => format!("host-{hops}"),
            (HostDirection::FromGpu, hops) => format!("{hops}-host"),
        });
        attributes.extend(route.map(|route| KeyValue::new("millrace.route", route)));
        attributes
    });
}

/// Returns the trace attributes of the fetch of an input.
pub(crate) fn fetch_attributes(method: FetchMethod, input: &str, bytes: u64) -> Vec<KeyValue> {
    vec![
        KeyValue::new("millrace.input", input.to_owned()),
        KeyValue::new("millrace.fetch.method", method_name(method)),
        KeyValue::new("millrace.bytes", i64::try_from(bytes).unwrap_or(i64::MAX)),
    ]
}

/// Returns the end and the duration of an interval that an executor measured. The worker and its executors
/// share CLOCK_MONOTONIC, so the difference from `now` is meaningful.
fn past(now: Timestamp, started: Timestamp, finished: Timestamp) -> FinishedSpan {
    FinishedSpan { ago: now.since(finished), took: finished.since(started) }
}
