//! Keeps this process's log lines for other processes to fetch (`millrace_proto::logs`). If spans
//! are created for export anyway, a line also keeps its trace id, and the request and function that
//! its spans name. This layer itself never causes a span.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use millrace_proto::log::{Level, Line};
use millrace_proto::logs::{self, LogRing};
use millrace_proto::trace::{REQUEST_ID, SCOPE};
use opentelemetry::trace::TraceContextExt as _;
use tracing::dispatcher::WeakDispatch;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Dispatch, Event, Subscriber};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter, filter_fn};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::clock;

/// The span fields that are kept with the lines within the span.
const OF_SPANS: [&str; 2] = [REQUEST_ID, "millrace.function"];

/// Returns the layer that keeps the lines that pass `filter`. `traced` is whether spans are created
/// for export.
pub(super) fn kept(filter: EnvFilter, process: &str, traced: bool) -> Box<dyn Layer<Registry> + Send + Sync> {
    let began = clock::wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let name = logs::ring_name(process, std::process::id(), began.as_nanos());
    let keeper = LogRingLayer { ring: logs::init_log_ring(process, name), dispatch: OnceLock::new() };
    let lines = filter.and(filter_fn(|about| about.is_event()));
    let spans = filter_fn(move |about| traced && about.is_span() && about.target().starts_with(SCOPE))
        .with_max_level_hint(LevelFilter::INFO);
    keeper.with_filter(lines.or(spans)).boxed()
}

struct LogRingLayer {
    ring: &'static LogRing,
    /// The dispatcher, which looks up the trace of a span.
    dispatch: OnceLock<WeakDispatch>,
}

/// The request and function fields of a span.
#[derive(Debug, Default)]
struct SpanFields(BTreeMap<String, String>);

/// A visitor that stores field values as text.
struct FieldVisitor<'a> {
    fields: &'a mut BTreeMap<String, String>,
    /// The names of the fields to store. Empty stores all fields.
    wanted: &'static [&'static str],
}

impl FieldVisitor<'_> {
    fn take(&mut self, field: &Field, value: impl FnOnce() -> String) {
        if self.wanted.is_empty() || self.wanted.contains(&field.name()) {
            self.fields.insert(field.name().to_owned(), value());
        }
    }
}

impl Visit for FieldVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, || value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take(field, || format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for LogRingLayer {
    fn on_register_dispatch(&self, dispatch: &Dispatch) {
        self.dispatch.get_or_init(|| dispatch.downgrade());
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut said = SpanFields::default();
        attributes.record(&mut FieldVisitor { fields: &mut said.0, wanted: &OF_SPANS });
        if let Some(span) = context.span(id).filter(|_| !said.0.is_empty()) {
            span.extensions_mut().insert(said);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(SpanFields(said)) = span.extensions().get::<SpanFields>() {
                fields.extend(said.iter().map(|(name, value)| (name.clone(), value.clone())));
            }
        }
        event.record(&mut FieldVisitor { fields: &mut fields, wanted: &[] });
        let message = fields.remove("message").unwrap_or_default();
        let trace_id =
            context.event_span(event).and_then(|span| self.trace_of(&span.id())).unwrap_or_default();
        self.ring.store_line(Line {
            time: Some(clock::wall().into()),
            level: level(*event.metadata().level()).into(),
            target: event.metadata().target().to_owned(),
            message,
            fields,
            trace_id,
            ..Line::default()
        });
    }
}

impl LogRingLayer {
    fn trace_of(&self, span: &Id) -> Option<String> {
        let dispatch = self.dispatch.get()?.upgrade()?;
        let context = tracing_opentelemetry::get_otel_context(span, &dispatch)?;
        let span = context.span();
        let of = span.span_context();
        of.is_sampled().then(|| of.trace_id().to_string())
    }
}

fn level(level: tracing::Level) -> Level {
    match level {
        tracing::Level::TRACE => Level::Trace,
        tracing::Level::DEBUG => Level::Debug,
        tracing::Level::INFO => Level::Info,
        tracing::Level::WARN => Level::Warn,
        tracing::Level::ERROR => Level::Error,
    }
}

#[cfg(test)]
mod tests {
    use millrace_proto::log::Query;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn lines_are_kept_with_their_span_fields_and_cause_no_span() {
        let said = |traced: bool| {
            let filter = EnvFilter::builder().parse("info").unwrap();
            let subscriber = tracing_subscriber::registry().with(vec![kept(filter, "test", traced)]);
            tracing::subscriber::with_default(subscriber, || {
                let span = tracing::info_span!(target: "millrace", "rpc", millrace.request.id = "r1");
                let _inside = span.enter();
                tracing::warn!(gpus = 4, "worker started");
                tracing::debug!("not this");
                span.is_disabled()
            })
        };
        assert!(said(false), "the layer alone enables no span");
        assert!(!said(true));
        let lines = logs::local_page(&Query::default()).lines;
        let shown: Vec<_> = lines.iter().map(|it| (it.message.as_str(), it.fields.len())).collect();
        assert_eq!(shown, [("worker started", 1), ("worker started", 2)]);
        assert_eq!((lines[1].fields[REQUEST_ID].as_str(), lines[1].fields["gpus"].as_str()), ("r1", "4"));
        assert_eq!((lines[0].level(), lines[0].process.as_str()), (Level::Warn, "test"));
    }
}
