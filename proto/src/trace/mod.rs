//! W3C trace context in gRPC metadata and HTTP headers, spans recorded after the fact, and the
//! spans that a process [stores](SpanRing).
//!
//! Without an OpenTelemetry layer the current span has no context: injecting writes nothing, and no
//! span is recorded.

mod span_ring;

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::global::{get_text_map_propagator, tracer};
use opentelemetry::propagation::{Extractor, Injector};
use opentelemetry::trace::{Span as _, Status, TraceContextExt as _, Tracer as _};
use tonic::metadata::{KeyRef, MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

pub use opentelemetry::KeyValue;

pub use self::span_ring::{FOUND_BYTES_MAX, FOUND_MAX, SpanRing, newest_within_limits};

/// Generated messages for spans shown to people.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod wire {
    tonic::include_proto!("millrace.trace.v1");
}

/// The attribute with the id of the request that a span belongs to.
pub const REQUEST_ID: &str = "millrace.request.id";
/// The instrumentation scope of Millrace's spans, in OpenTelemetry's terms.
pub const SCOPE: &str = "millrace";

struct Metadata<'a>(&'a MetadataMap);
struct MetadataMut<'a>(&'a mut MetadataMap);
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        let ascii = |key| match key {
            KeyRef::Ascii(key) => Some(key.as_str()),
            KeyRef::Binary(_) => None,
        };
        self.0.keys().filter_map(ascii).collect()
    }
}

impl Injector for MetadataMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // A propagator's keys and values are plain ASCII. Others cannot be sent and are skipped.
        if let (Ok(key), Ok(value)) =
            (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value))
        {
            self.0.insert(key, value);
        }
    }
}

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// Returns the trace context that a gRPC caller sent.
#[must_use]
pub fn extract(metadata: &MetadataMap) -> Context {
    get_text_map_propagator(|propagator| propagator.extract(&Metadata(metadata)))
}

/// Returns the trace context that an HTTP caller sent.
#[must_use]
pub fn extract_headers(headers: &HeaderMap) -> Context {
    get_text_map_propagator(|propagator| propagator.extract(&Headers(headers)))
}

/// Makes `span` a child of the caller's span.
pub fn adopt(span: &Span, parent: Context) {
    // An error means that no OpenTelemetry layer is installed, so there is no trace to join.
    if let Err(error) = span.set_parent(parent) {
        tracing::trace!(%error, "span keeps no parent");
    }
}

/// Writes the current span's context into a request's metadata.
pub fn inject(metadata: &mut MetadataMap) {
    let context = Span::current().context();
    get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut MetadataMut(metadata)));
}

/// Returns whether a span is recorded.
#[must_use]
pub fn is_recorded(span: &Span) -> bool {
    !span.is_disabled() && span.context().span().span_context().is_sampled()
}

/// Returns the trace id of the current span as 32 hex digits, if the span is recorded.
#[must_use]
pub fn recorded_id() -> Option<String> {
    let span = Span::current();
    is_recorded(&span).then(|| span.context().span().span_context().trace_id().to_string())
}

/// The time of an event that has ended, relative to now, by a monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct FinishedSpan {
    /// The time since the end.
    pub ago: Duration,
    /// The duration of the event.
    pub took: Duration,
}

/// Adds a finished child span to `parent`, for work that another process or a device did and
/// reported afterwards. Costs nothing if the parent is not recorded.
pub fn record_finished(
    parent: &Span,
    name: &'static str,
    past: FinishedSpan,
    attributes: impl FnOnce() -> Vec<KeyValue>,
) {
    if parent.is_disabled() {
        return;
    }
    let context = parent.context();
    if !context.span().span_context().is_sampled() {
        return;
    }
    // Collectors put spans of several machines on a single axis, that of the wall clock.
    #[allow(clippy::disallowed_methods, reason = "spans are in wall-clock time and decide nothing")]
    let ended = SystemTime::now() - past.ago;
    let tracer = tracer(SCOPE);
    let told = tracer.span_builder(name).with_start_time(ended - past.took).with_attributes(attributes());
    told.start_with_context(&tracer, &context).end_with_timestamp(ended);
}

/// Adds an event to a span. Costs nothing if the span is not recorded.
pub fn add_event(span: &Span, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) {
    if !span.is_disabled() {
        span.add_event(name, attributes());
    }
}

/// Adds attributes to a span. Costs nothing if the span is not recorded.
pub fn add_attributes(span: &Span, attributes: impl FnOnce() -> Vec<KeyValue>) {
    if !span.is_disabled() {
        attributes().into_iter().for_each(|it| span.set_attribute(it.key, it.value));
    }
}

/// Marks a span as failed.
pub fn fail(span: &Span, why: impl std::fmt::Display) {
    if !span.is_disabled() {
        span.set_status(Status::error(why.to_string()));
    }
}
