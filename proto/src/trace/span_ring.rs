//! A ring of a process's last spans in memory, so that a request can be traced without a collector.
//!
//! Every sampled span enters the ring when it ends; readers get the spans of a trace. Beyond `max`
//! spans, the oldest are dropped. The ring exists only if an operator asks for it; otherwise
//! nothing is recorded.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{SpanId, Status};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use prost::Message as _;

use super::{REQUEST_ID, wire};

/// Maximum length of a stored text, in characters. Some texts come from clients.
const TEXT_LEN_MAX: usize = 256;
/// Maximum number of spans returned for a trace, the last ones. A trace may have thousands of
/// requests.
pub const FOUND_MAX: usize = 5_000;

/// Maximum encoded size of the spans returned for a trace, in bytes: below the limit of clients.
pub const FOUND_BYTES_MAX: usize = 3 << 20;

/// The stored spans of a process. Cheap to clone: all clones share the spans.
#[derive(Debug, Clone)]
pub struct SpanRing {
    process: Arc<str>,
    spans: Arc<Mutex<VecDeque<wire::Span>>>,
    max: NonZeroU32,
}

impl SpanRing {
    /// Creates an empty ring. `process` is the name for people, such as `worker-2`.
    #[must_use]
    pub fn new(process: &str, max: NonZeroU32) -> Self {
        Self { process: process.into(), spans: Arc::default(), max }
    }

    /// Returns the spans of a trace, or of the last trace with a request of this id. Empty if
    /// neither is known.
    #[must_use]
    pub fn find(&self, id: &str) -> Vec<wire::Span> {
        let spans = self.spans();
        let is_of = |span: &&wire::Span| {
            span.trace_id == id || span.attributes.get(REQUEST_ID).is_some_and(|request| request == id)
        };
        let Some(last) = spans.iter().rev().find(is_of) else { return Vec::new() };
        let of_trace = spans.iter().rev().filter(|span| span.trace_id == last.trace_id);
        let mut found: Vec<_> = newest_within_limits(of_trace).cloned().collect();
        found.reverse();
        found
    }

    fn keep(&self, span: wire::Span) {
        let mut spans = self.spans();
        let oldest = if spans.len() >= self.max.get() as usize { spans.pop_front() } else { None };
        spans.push_back(span);
        // The oldest span is freed outside the lock, which every ending span takes.
        drop(spans);
        drop(oldest);
    }

    /// Ignores poison: the list is whole even if a thread panicked while it held the lock.
    fn spans(&self) -> MutexGuard<'_, VecDeque<wire::Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the leading spans up to [`FOUND_MAX`] and [`FOUND_BYTES_MAX`].
pub fn newest_within_limits<'a>(
    newest_first: impl Iterator<Item = &'a wire::Span>,
) -> impl Iterator<Item = &'a wire::Span> {
    let mut bytes = 0;
    newest_first.take(FOUND_MAX).take_while(move |span| {
        bytes += span.encoded_len();
        bytes <= FOUND_BYTES_MAX
    })
}

impl SpanProcessor for SpanRing {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() {
            self.keep(shown(&self.process, span));
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

fn shown(process: &str, span: SpanData) -> wire::Span {
    let parent = Some(span.parent_span_id).filter(|&id| id != SpanId::INVALID);
    let events = span.events.iter().map(|event| wire::SpanEvent {
        name: short(&event.name),
        after_ns: nanos_between(span.start_time, event.timestamp),
        attributes: texts(&event.attributes),
    });
    wire::Span {
        trace_id: span.span_context.trace_id().to_string(),
        span_id: span.span_context.span_id().to_string(),
        parent_span_id: parent.map(|id| id.to_string()).unwrap_or_default(),
        name: short(&span.name),
        process: process.to_owned(),
        start_unix_ns: nanos_between(SystemTime::UNIX_EPOCH, span.start_time),
        duration_ns: nanos_between(span.start_time, span.end_time),
        attributes: texts(&span.attributes),
        events: events.collect(),
        error: match span.status {
            Status::Error { description } if description.is_empty() => "failed".to_owned(),
            Status::Error { description } => short(&description),
            Status::Unset | Status::Ok => String::new(),
        },
    }
}

/// Returns zero if the clock was set back in between.
fn nanos_between(from: SystemTime, to: SystemTime) -> u64 {
    to.duration_since(from).map_or(0, |span| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    attributes.iter().map(|it| (it.key.to_string(), short(&it.value.as_str()))).collect()
}

fn short(text: &str) -> String {
    match text.char_indices().nth(TEXT_LEN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{Span as _, TraceContextExt as _, Tracer as _, TracerProvider as _};
    use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};

    use super::*;

    fn kept(max: u32) -> (SpanRing, SdkTracerProvider) {
        let kept = SpanRing::new("worker-2", NonZeroU32::new(max).unwrap());
        let provider = SdkTracerProvider::builder().with_span_processor(kept.clone()).build();
        (kept, provider)
    }

    /// Records a trace of a parent and a child, and returns the trace's id.
    fn trace(provider: &SdkTracerProvider, request: &str) -> String {
        let tracer = provider.tracer("test");
        let attributes = [KeyValue::new(REQUEST_ID, request.to_owned())];
        let parent = tracer.span_builder("request").with_attributes(attributes).start(&tracer);
        let context = Context::new().with_span(parent);
        let mut child = tracer.start_with_context("run", &context);
        child.set_status(Status::error("the executor died"));
        child.end();
        context.span().end();
        context.span().span_context().trace_id().to_string()
    }

    #[test]
    fn a_request_id_finds_its_last_trace_and_a_trace_id_its_trace() {
        let (kept, provider) = kept(100);
        let first = trace(&provider, "a");
        let last = trace(&provider, "a");
        trace(&provider, "b");
        let found = kept.find("a");
        let listed: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.error.as_str())).collect();
        assert_eq!(listed, [("run", "the executor died"), ("request", "")]);
        assert_eq!((&found[0].trace_id, &found[0].parent_span_id), (&last, &found[1].span_id));
        assert_eq!((found[1].parent_span_id.as_str(), found[1].process.as_str()), ("", "worker-2"));
        assert!(kept.find(&first).iter().all(|span| span.trace_id == first));
        assert_eq!(kept.find("c"), []);
    }

    #[test]
    fn the_oldest_spans_are_dropped_when_the_ring_is_full() {
        let (kept, provider) = kept(3);
        let first = trace(&provider, "a");
        let last = trace(&provider, "b");
        assert_eq!((kept.find(&first).len(), kept.find(&last).len()), (1, 2));
    }

    #[test]
    fn the_last_spans_that_fit_a_message_are_found() {
        let span = |start_unix_ns, bytes| wire::Span {
            start_unix_ns,
            name: "n".repeat(bytes),
            ..wire::Span::default()
        };
        let spans: Vec<_> = (0..9).map(|start| span(start, FOUND_BYTES_MAX / 4)).collect();
        let found: Vec<_> = newest_within_limits(spans.iter().rev()).map(|it| it.start_unix_ns).collect();
        assert_eq!(found, [8, 7, 6]);
        let many: Vec<_> = (0..=FOUND_MAX).map(|start| span(start as u64, 1)).collect();
        assert_eq!(newest_within_limits(many.iter().rev()).count(), FOUND_MAX);
    }

    #[test]
    fn long_texts_of_clients_are_cut() {
        let (kept, provider) = kept(3);
        let long = "é".repeat(TEXT_LEN_MAX + 9);
        let id = trace(&provider, &long);
        let request = &kept.find(&id)[1].attributes[REQUEST_ID];
        assert_eq!(*request, format!("{}…", "é".repeat(TEXT_LEN_MAX)));
    }

    #[test]
    fn unsampled_spans_are_not_stored() {
        let kept = SpanRing::new("up", NonZeroU32::MIN);
        let provider = SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOff);
        trace(&provider.with_span_processor(kept.clone()).build(), "a");
        assert_eq!(kept.find("a"), []);
    }
}
