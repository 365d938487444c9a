//! A trace for people and programs: its spans as a tree, ordered by start, and the latency
//! breakdown.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_client::messages as wire;
use millrace_types::manifest::API_VERSION;
use serde::Serialize;

use crate::output::ListFormat;
use crate::output::table::{TextTable, col, wide};
use crate::output::text::latency;

/// The parts of a request's time, and the span attributes in which the worker reports them.
const PARTS: [(&str, &str); 3] =
    [("queue", "millrace.queue_ms"), ("swap", "millrace.swap_ms"), ("run", "millrace.run_ms")];
/// The attributes that repeat other attributes or the span's name.
const REPEATED: [&str; 5] =
    ["millrace.request.id", "rpc.method", "rpc.service", "rpc.system", "http.request.method"];

/// A trace as a document.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TraceDocument {
    api_version: &'static str,
    kind: &'static str,
    trace_id: String,
    duration_ms: f64,
    spans: Vec<Span>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Span {
    id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    parent: String,
    name: String,
    process: String,
    /// The start of the span, since the start of the trace.
    start_ms: f64,
    duration_ms: f64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    events: Vec<Event>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    name: String,
    after_ms: f64,
    attributes: BTreeMap<String, String>,
}

fn ms(nanos: u64) -> f64 {
    nanos as f64 / 1e6
}

fn time(ms: f64) -> String {
    latency(Duration::from_nanos((ms * 1e6).round() as u64))
}

impl TraceDocument {
    pub(crate) fn new(trace: wire::Trace) -> Self {
        let began = trace.spans.iter().map(|span| span.start_unix_ns).min().unwrap_or(0);
        let ended = trace.spans.iter().map(|span| span.start_unix_ns.saturating_add(span.duration_ns)).max();
        let span = |span: millrace_client::Span| Span {
            id: span.span_id,
            parent: span.parent_span_id,
            name: span.name,
            process: span.process,
            start_ms: ms(span.start_unix_ns - began),
            duration_ms: ms(span.duration_ns),
            attributes: span.attributes,
            events: span.events.into_iter().map(event).collect(),
            error: span.error,
        };
        Self {
            api_version: API_VERSION,
            kind: "Trace",
            trace_id: trace.trace_id,
            duration_ms: ms(ended.unwrap_or(began) - began),
            spans: trace.spans.into_iter().map(span).collect(),
            missing: trace.missing,
        }
    }

    /// Returns the spans as a tree with a line each, under a summary line.
    pub(crate) fn tree(&self, format: ListFormat) -> String {
        let mut table =
            TextTable::new([col("SPAN"), col("START"), col("TIME"), col("PROCESS"), wide("ID"), col("WHAT")]);
        let known: BTreeSet<&str> = self.spans.iter().map(|span| span.id.as_str()).collect();
        let roots: Vec<_> = self.spans.iter().filter(|span| !known.contains(span.parent.as_str())).collect();
        for root in roots {
            self.branch(&mut table, root, ("", ""));
        }
        let mut text = format!("trace {}   {}\n", self.trace_id, self.summary());
        text += &table.render(format);
        for missing in &self.missing {
            text += &format!("missing: {missing}\n");
        }
        text
    }

    /// Adds a span and all its descendants. `lead` is the text before the span's name, and the text
    /// before its children's names.
    fn branch(&self, table: &mut TextTable, span: &Span, lead: (&str, &str)) {
        table.row([
            format!("{}{}", lead.0, span.name),
            format!("+{}", time(span.start_ms)),
            time(span.duration_ms),
            span.process.clone(),
            span.id.clone(),
            span.what(),
        ]);
        let children: Vec<_> = self.spans.iter().filter(|child| child.parent == span.id).collect();
        for (index, child) in children.iter().enumerate() {
            let (own, below) =
                if index + 1 == children.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            self.branch(table, child, (&format!("{}{own}", lead.1), &format!("{}{below}", lead.1)));
        }
    }

    /// Returns the trace's duration, its breakdown, and the number of failed runs.
    fn summary(&self) -> String {
        let part = |(name, attribute): (&str, &str)| {
            let spent = self.spans.iter().rev().find_map(|span| span.attributes.get(attribute))?;
            Some(format!("{name} {}", time(spent.parse().ok()?)))
        };
        let runs = || self.spans.iter().filter(|span| span.name == "run");
        let failed = runs().filter(|span| !span.error.is_empty()).count();
        let mut said = vec![time(self.duration_ms)];
        match self.spans.iter().filter(|span| span.name == "step").count() {
            0 => said.extend(PARTS.into_iter().filter_map(part)),
            // Each step has a breakdown of its own, and steps may overlap, so no sum is shown.
            1 => said.push("1 step".to_owned()),
            steps => said.push(format!("{steps} steps")),
        }
        if failed > 0 {
            said.push(format!("{failed} of {} runs failed", runs().count()));
        }
        said.join(", ")
    }
}

impl Span {
    /// Returns the span's error, attributes and events on a single line.
    fn what(&self) -> String {
        let failed = (!self.error.is_empty()).then(|| format!("FAILED: {}", self.error));
        let attributes = self.attributes.iter().filter(|(name, _)| !REPEATED.contains(&name.as_str()));
        let attributes = attributes.map(|(name, value)| short(name, value));
        let events = self.events.iter().map(|event| {
            let attributes = event.attributes.iter().map(|(name, value)| format!(" {}", short(name, value)));
            format!("{} at +{}{}", event.name, time(event.after_ms), attributes.collect::<String>())
        });
        failed.into_iter().chain(attributes).chain(events).collect::<Vec<_>>().join("; ")
    }
}

fn event(event: millrace_client::SpanEvent) -> Event {
    Event { name: event.name, after_ms: ms(event.after_ns), attributes: event.attributes }
}

/// Formats an attribute. The prefix of Millrace's own attributes is omitted.
fn short(name: &str, value: &str) -> String {
    let name = name.strip_prefix("millrace.").unwrap_or(name);
    match value.parse::<f64>() {
        // Spans have a resolution of a microsecond.
        Ok(ms) if name.ends_with("_ms") => format!("{name}={}", (ms * 1000.0).round() / 1000.0),
        _ => format!("{name}={value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(
        id: &str,
        parent: &str,
        name: &str,
        start_ms: u64,
        ms: u64,
        error: &str,
    ) -> millrace_client::Span {
        millrace_client::Span {
            trace_id: "t".into(),
            span_id: id.into(),
            parent_span_id: parent.into(),
            name: name.into(),
            process: if id == "a" { "controller-1" } else { "worker-2" }.into(),
            start_unix_ns: 1_000_000_000 + start_ms * 1_000_000,
            duration_ns: ms * 1_000_000,
            attributes: match name {
                "infer" => {
                    [("millrace.queue_ms".into(), "2.5".into()), ("rpc.system".into(), "grpc".into())].into()
                }
                _ => [("millrace.gpu".into(), "1".into())].into(),
            },
            events: Vec::new(),
            error: error.into(),
        }
    }

    #[test]
    fn a_trace_is_printed_as_a_breakdown_and_a_tree_of_spans() {
        let trace = TraceDocument::new(wire::Trace {
            trace_id: "4bf9".into(),
            spans: vec![
                span("a", "client", "infer", 0, 40, ""),
                span("b", "a", "queue", 1, 2, ""),
                span("c", "a", "run", 3, 10, "the executor died"),
                span("d", "a", "run", 15, 20, ""),
                span("e", "d", "launch", 16, 4, ""),
            ],
            missing: vec!["worker-1: no answer within 1s".into()],
        });
        let expected = "\
trace 4bf9   40.0 ms, queue 2.50 ms, 1 of 2 runs failed
SPAN           START      TIME      PROCESS        WHAT
infer          +0         40.0 ms   controller-1   queue_ms=2.5
├─ queue       +1.00 ms   2.00 ms   worker-2       gpu=1
├─ run         +3.00 ms   10.0 ms   worker-2       FAILED: the executor died; gpu=1
└─ run         +15.0 ms   20.0 ms   worker-2       gpu=1
   └─ launch   +16.0 ms   4.00 ms   worker-2       gpu=1
missing: worker-1: no answer within 1s
";
        assert_eq!(trace.tree(ListFormat::Table), expected);
    }
}
