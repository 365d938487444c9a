//! The paths of a workflow's tensors to its steps, read from the request's trace. Values that the
//! trace does not have stay blank.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_client::{Span, messages as wire};
use millrace_types::WorkflowSpec;
use millrace_types::workflow::{Step, TensorSource};

use crate::output::ListFormat;
use crate::output::table::{TextTable, col};
use crate::output::text;

/// The spans of a trace, indexed by id.
pub(super) struct TensorPaths<'a> {
    spec: &'a WorkflowSpec,
    spans: BTreeMap<&'a str, &'a Span>,
    /// The spans, ordered by start.
    in_order: Vec<&'a Span>,
}

/// A successful run of a step.
struct StepRun<'a> {
    invoke: &'a Span,
    worker: &'a str,
    gpu: Option<&'a str>,
}

impl StepRun<'_> {
    /// Returns the GPU of the run on its worker.
    fn place(&self, whose: &str) -> String {
        self.gpu.map_or_else(|| format!("{whose} executor"), |gpu| format!("{whose} GPU {gpu}"))
    }

    /// Returns the worker and the GPU of the run.
    fn worker_place(&self) -> String {
        self.place(&format!("{}'s", self.worker))
    }
}

impl<'a> TensorPaths<'a> {
    pub(super) fn new(spec: &'a WorkflowSpec, trace: &'a wire::Trace) -> Self {
        let spans = trace.spans.iter().map(|span| (span.span_id.as_str(), span)).collect();
        let mut in_order: Vec<_> = trace.spans.iter().collect();
        in_order.sort_by_key(|span| span.start_unix_ns);
        Self { spec, spans, in_order }
    }

    /// Returns whether the trace is complete: the request's own span arrives last.
    pub(super) fn is_whole(&self) -> bool {
        let is_root = |span: &&&Span| !self.spans.contains_key(span.parent_span_id.as_str());
        let mut roots = self.in_order.iter().filter(is_root);
        matches!((roots.next(), roots.next()), (Some(root), None) if root.name != "step")
    }

    /// Returns the steps that did not run.
    pub(super) fn skipped(&self) -> Vec<&'a Step> {
        self.spec.in_order().into_iter().filter(|step| self.runs_of(step).is_empty()).collect()
    }

    /// Returns a table with a line for each input of each run.
    pub(super) fn table(&self) -> String {
        let columns = ["STEP", "INPUT", "METHOD", "PATH", "BYTES", "WAIT", "TIME"].map(col);
        let mut table = TextTable::new(columns);
        for step in self.spec.in_order() {
            for run in self.runs_of(step) {
                let Some(ran) = self.ran(run) else { continue };
                for (input, source) in &step.inputs {
                    self.row(&mut table, run, &ran, input, source);
                }
            }
        }
        table.render(ListFormat::Table)
    }

    fn row(&self, table: &mut TextTable, run: &Span, ran: &StepRun<'_>, input: &str, source: &TensorSource) {
        let fetch = self.below(ran.invoke).find(|span| span.name == "fetch" && is(span, "input", input));
        let method = fetch.and_then(|fetch| attribute(fetch, "fetch.method"));
        let (method, from, to) = match (method, source) {
            (Some("intra-gpu"), _) => ("intra-gpu", "in place".to_owned(), ran.worker_place()),
            (Some("inter-gpu"), source) => {
                let from =
                    self.maker(source).map_or_else(|| "another GPU".to_owned(), |it| it.worker_place());
                ("inter-gpu", from, ran.place("its"))
            }
            (Some("host"), source) => {
                // If another GPU made the tensor, its path led from there over the host.
                let made = self.maker(source).filter(|made| made.worker == ran.worker);
                let gpu = made.and_then(|made| made.gpu).filter(|&gpu| Some(gpu) != ran.gpu);
                let over = gpu.map(|gpu| format!("GPU {gpu} over ")).unwrap_or_default();
                ("host", format!("{over}memory of {}", ran.worker), ran.place("its"))
            }
            (Some(method), source) => {
                let maker = self.maker(source).map_or("another worker", |made| made.worker);
                (method, format!("memory of {maker}"), ran.worker_place())
            }
            (None, TensorSource::Input(_)) => ("request", "the request".to_owned(), ran.worker_place()),
            // The tensor is small enough to travel with the calls.
            (None, TensorSource::Step { .. }) => ("call", "the controller".to_owned(), ran.worker_place()),
        };
        let bytes = fetch.and_then(|fetch| attribute(fetch, "bytes")?.parse().ok());
        // Before the dispatch to a GPU, a request also waits for admission. The worker reports the
        // sum.
        let wait = attribute(ran.invoke, "queue_ms").and_then(|ms| ms.parse::<f64>().ok());
        let time = |nanos: u64| text::latency(Duration::from_nanos(nanos));
        let row = attribute(run, "row").map(|row| format!(" row {row}")).unwrap_or_default();
        table.row([
            format!("{}{row}", attribute(run, "step").unwrap_or_default()),
            input.to_owned(),
            method.to_owned(),
            if from == "in place" { format!("in place on {to}") } else { format!("{from} to {to}") },
            bytes.map(text::size).unwrap_or_default(),
            wait.map(|ms| time((ms * 1e6) as u64)).unwrap_or_default(),
            fetch.map(|fetch| time(fetch.duration_ns)).unwrap_or_default(),
        ]);
    }

    /// Returns the run that made a tensor, if the trace has it.
    fn maker(&self, source: &TensorSource) -> Option<StepRun<'a>> {
        let TensorSource::Step { step, .. } = source else { return None };
        let run = self.spec.step(step).and_then(|step| self.runs_of(step).pop());
        run.and_then(|run| self.ran(run))
    }

    /// Returns the runs of a step of this workflow, without the steps of nested workflows.
    fn runs_of(&self, step: &Step) -> Vec<&'a Span> {
        let mine = |span: &&&Span| {
            span.name == "step"
                && is(span, "step", step.name.as_str())
                && !self.above(span).any(|above| above.name == "step")
        };
        self.in_order.iter().filter(mine).copied().collect()
    }

    /// Returns the last attempt of a run that was answered.
    fn ran(&self, run: &Span) -> Option<StepRun<'a>> {
        let mut attempts =
            self.below(run).filter(|span| span.name == "worker.invoke" && span.error.is_empty());
        let invoke = attempts.next_back()?;
        let gpu = self.below(invoke).rfind(|span| span.name == "run" && span.error.is_empty());
        let worker = self.above(invoke).find_map(|span| attribute(span, "worker"));
        let worker = worker.unwrap_or(&invoke.process);
        Some(StepRun { invoke, worker, gpu: gpu.and_then(|run| attribute(run, "gpu")) })
    }

    fn above(&self, span: &Span) -> impl Iterator<Item = &'a Span> {
        let parent = |span: &Span| self.spans.get(span.parent_span_id.as_str()).copied();
        std::iter::successors(parent(span), move |span| parent(span))
    }

    fn below(&self, top: &Span) -> impl DoubleEndedIterator<Item = &'a Span> {
        let id = top.span_id.clone();
        self.in_order.iter().copied().filter(move |span| self.above(span).any(|above| above.span_id == id))
    }
}

/// Returns an attribute of Millrace.
fn attribute<'a>(span: &'a Span, name: &str) -> Option<&'a str> {
    span.attributes.get(&format!("millrace.{name}")).map(String::as_str)
}

fn is(span: &Span, name: &str, value: &str) -> bool {
    attribute(span, name) == Some(value)
}

#[cfg(test)]
mod tests {
    use super::super::workflow;
    use super::*;

    fn span(id: &str, parent: &str, name: &str, ms: u64, attributes: &[(&str, &str)]) -> Span {
        let attributes =
            attributes.iter().map(|(name, value)| (format!("millrace.{name}"), (*value).to_owned()));
        Span {
            trace_id: "t".into(),
            span_id: id.into(),
            parent_span_id: parent.into(),
            name: name.into(),
            process: "demo".into(),
            // The start follows the order of the ids.
            start_unix_ns: id.bytes().map(u64::from).sum(),
            duration_ns: ms * 1_000_000,
            attributes: attributes.collect(),
            events: Vec::new(),
            error: String::new(),
        }
    }

    fn trace() -> wire::Trace {
        let failed = Span { error: "the executor died".into(), ..span("j", "h", "run", 2, &[("gpu", "1")]) };
        let spans = vec![
            span("a", "client", "ModelInfer", 40, &[]),
            span("b", "a", "step", 20, &[("step", "detect")]),
            span("c", "b", "attempt", 20, &[("worker", "worker-1")]),
            span("d", "c", "worker.invoke", 20, &[("queue_ms", "1.5")]),
            span("f", "d", "run", 10, &[("gpu", "0")]),
            span("g", "a", "step", 15, &[("step", "people")]),
            span("ga", "g", "attempt", 15, &[("worker", "worker-2")]),
            span("h", "ga", "worker.invoke", 15, &[("queue_ms", "3")]),
            span("ha", "h", "fetch", 3, &[("input", "x"), ("fetch.method", "inter-node"), ("bytes", "2048")]),
            failed,
            span("l", "h", "run", 5, &[("gpu", "0")]),
        ];
        wire::Trace { trace_id: "t".into(), spans, missing: Vec::new() }
    }

    #[test]
    fn each_input_has_its_path_and_its_measured_time() {
        let spec = workflow().unwrap();
        let trace = trace();
        let hops = TensorPaths::new(&spec, &trace);
        let expected = "\
STEP     INPUT   METHOD       PATH                                     BYTES     WAIT      TIME
detect   frame   request      the request to worker-1's GPU 0          -         1.50 ms   -
people   x       inter-node   memory of worker-1 to worker-2's GPU 0   2.0 KiB   3.00 ms   3.00 ms
";
        assert_eq!(hops.table(), expected);
        assert_eq!(hops.skipped().iter().map(|step| step.name.as_str()).collect::<Vec<_>>(), ["vehicles"]);
    }

    #[test]
    fn an_input_from_the_same_worker_is_in_place_or_from_a_gpu_or_over_the_host() {
        let spec = workflow().unwrap();
        let row = |method: &str, gpu: &str| {
            let mut trace = trace();
            for span in &mut trace.spans {
                let (name, value) = match (span.name.as_str(), span.span_id.as_str()) {
                    ("attempt", _) => ("worker", "worker-1"),
                    ("fetch", _) => ("fetch.method", method),
                    (_, "l") => ("gpu", gpu),
                    _ => continue,
                };
                span.attributes.insert(format!("millrace.{name}"), value.to_owned());
            }
            let table = TensorPaths::new(&spec, &trace).table();
            let line = table.lines().last().unwrap();
            line.split("  ").map(str::trim).filter(|it| !it.is_empty()).nth(3).unwrap().to_owned()
        };
        assert_eq!(row("intra-gpu", "0"), "in place on worker-1's GPU 0");
        assert_eq!(row("inter-gpu", "1"), "worker-1's GPU 0 to its GPU 1");
        assert_eq!(row("host", "1"), "GPU 0 over memory of worker-1 to its GPU 1");
        assert_eq!(row("host", "0"), "memory of worker-1 to its GPU 0");
    }

    #[test]
    fn a_trace_is_complete_once_the_request_has_ended() {
        let spec = workflow().unwrap();
        let mut trace = trace();
        assert!(TensorPaths::new(&spec, &trace).is_whole());
        trace.spans.remove(0);
        assert!(!TensorPaths::new(&spec, &trace).is_whole());
        trace.spans.clear();
        assert!(!TensorPaths::new(&spec, &trace).is_whole());
    }
}
