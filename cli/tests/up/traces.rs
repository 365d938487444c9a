//! A request is a single trace across the client's process and the cluster's, down to copies and
//! launches, both at a collector and in `millrace trace`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use millrace_client::messages::{Fault, InjectFaultRequest};
use millrace_client::{Admin, Endpoints};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::metrics::scrape;
use crate::running::{RunningCluster, eventually, millrace, repository};

const IMAGE: &str = "examples/digits/images/digit-3.png";

/// The fields of a span that these tests read.
#[derive(Debug, Clone)]
struct Span {
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
    service: String,
}

/// A collector that stores the received spans.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.map(|it| it.attributes).unwrap_or_default();
            let name = attributes.into_iter().find(|it| it.key == "service.name");
            let service = match name.and_then(|it| it.value?.value) {
                Some(Value::StringValue(service)) => service,
                _ => String::new(),
            };
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            let spans = spans.map(|span| Span {
                trace: span.trace_id,
                id: span.span_id,
                parent: span.parent_span_id,
                name: span.name,
                service: service.clone(),
            });
            self.0.lock().unwrap().extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    fn start() -> (Self, SocketAddr, Runtime) {
        let collector = Self::default();
        let runtime = Runtime::new().unwrap();
        let _context = runtime.enter();
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = incoming.local_addr().unwrap();
        let service = TraceServiceServer::new(collector.clone());
        runtime.spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
        drop(_context);
        (collector, address, runtime)
    }

    /// Returns each span of the trace whose root has this name: the path of names from the root,
    /// and the service.
    fn paths(&self, root: &str) -> BTreeSet<(String, String)> {
        let spans = self.0.lock().unwrap().clone();
        let Some(root) = spans.iter().find(|span| span.name == root && span.parent.is_empty()) else {
            return BTreeSet::new();
        };
        let by_id: BTreeMap<_, _> = spans.iter().map(|span| (span.id.clone(), span)).collect();
        let path = |span: &Span| {
            let mut names = vec![span.name.as_str()];
            let mut at = span;
            while let Some(&parent) = by_id.get(&at.parent) {
                names.push(&parent.name);
                at = parent;
            }
            names.reverse();
            (names.join(" > "), span.service.clone())
        };
        spans.iter().filter(|span| span.trace == root.trace).map(path).collect()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the collector received: {:#?}", self.paths("invoke"));
        }
    }
}

fn expected(paths: &[(&str, &str)]) -> BTreeSet<(String, String)> {
    paths.iter().map(|&(path, service)| (path.to_owned(), service.to_owned())).collect()
}

#[test]
fn a_request_is_a_single_trace_from_the_client_to_its_copies_and_launches() {
    let (collector, address, _runtime) = Collector::start();
    let otlp = format!("http://{address}");
    let up = RunningCluster::ephemeral(&["--gpus", "1", "--otlp-endpoint", &otlp]);
    up.ok(&["apply", "-f", &repository("examples/digits/function.yaml"), "--otlp-endpoint", &otlp]);
    up.ok(&["invoke", "digits", "--image", &repository(IMAGE), "--otlp-endpoint", &otlp]);
    let infer = "invoke > inference.GRPCInferenceService/ModelInfer";
    let worker = format!("{infer} > attempt > worker.invoke");
    let of_server = [
        infer.to_owned(),
        format!("{infer} > attempt"),
        worker.clone(),
        format!("{worker} > admission"),
        format!("{worker} > queue"),
        format!("{worker} > swap"),
        format!("{worker} > swap > copy"),
        format!("{worker} > run"),
        format!("{worker} > run > launch"),
    ];
    let mut wanted: Vec<_> = of_server.iter().map(|path| (path.as_str(), "millrace")).collect();
    wanted.push(("invoke", "millrace-client"));
    let wanted = expected(&wanted);
    let missing = || wanted.difference(&collector.paths("invoke")).cloned().collect::<Vec<_>>();
    eventually("the server's spans have arrived", || missing().is_empty());
    let others: Vec<_> = collector.paths("invoke").difference(&wanted).cloned().collect();
    let metadata =
        |(path, _): &(String, String)| path.starts_with("invoke > inference.GRPCInferenceService/Model");
    assert!(others.iter().all(metadata), "the only other spans are the client's metadata calls: {others:?}");
    let write = "apply > millrace.admin.v1.Admin/ApplyFunction";
    let wanted = expected(&[(write, "millrace"), (&format!("{write} > raft.propose"), "millrace")]);
    eventually("the write's spans have arrived", || collector.paths("apply").is_superset(&wanted));
}

#[test]
fn a_retried_request_has_both_runs_in_its_trace_without_a_collector() {
    let up = RunningCluster::ephemeral(&["--gpus", "1", "--keep-spans", "1000", "--allow", "faults"]);
    up.apply_digits();
    let runtime = Runtime::new().unwrap();
    let admin =
        runtime.block_on(async { Admin::new(Endpoints::new(vec![up.client.parse().unwrap()]).unwrap()) });
    let fault = InjectFaultRequest {
        node: "worker-1".to_owned(),
        gpu: 0,
        fault: Fault::AbortOnRun.into(),
        ..Default::default()
    };
    runtime.block_on(admin.inject_fault(fault)).unwrap();
    up.ok(&["invoke", "digits", "--image", &repository(IMAGE), "--request-id", "unlucky"]);
    // The response may arrive before the last span has ended.
    eventually("the trace has the second run and the breakdown", || {
        // The trace is not found before the first span with the request's id has ended.
        let text = String::from_utf8_lossy(&up.run(&["trace", "unlucky"]).stdout).into_owned();
        text.contains("1 of 2 runs failed") && text.contains(", queue ")
    });
    let text = up.ok(&["trace", "unlucky"]);
    assert!(text.contains("FAILED: the executor was lost"), "{text}");
    assert!(text.contains(", queue ") && text.contains(", run "), "{text}");
    let trace = up.json(&["trace", "unlucky"]);
    let spans = trace["spans"].as_array().unwrap();
    let of = |name: &str| spans.iter().filter(|span| span["name"] == name).collect::<Vec<_>>();
    let attempts: Vec<_> =
        of("run").iter().map(|run| run["attributes"]["millrace.attempt"].clone()).collect();
    assert_eq!(attempts, ["1", "2"], "{text}");
    // The log line tells an operator that there is a trace to look at.
    let logged = up.ok(&["logs", "--level", "warn"]);
    assert!(logged.contains("a GPU was lost with requests on it") && logged.contains("unlucky"), "{logged}");
    assert_eq!((of("queue").len(), of("swap").len()), (2, 2), "{text}");
    // `logs --function` finds the lines within the span by this attribute.
    assert_eq!(of("worker.invoke")[0]["attributes"]["millrace.function"], "default/digits", "{text}");
    let served_by = &of("attempt")[0]["attributes"]["millrace.served_by"];
    assert!(served_by.as_str().unwrap().starts_with("worker-1/0 "), "{text}");
    let by_trace = up.json(&["trace", trace["traceId"].as_str().unwrap()]);
    assert_eq!(by_trace["spans"], trace["spans"]);
    // The exemplar links a slow bucket to its trace.
    let exemplar = format!(" # {{trace_id=\"{}\"}} ", trace["traceId"].as_str().unwrap());
    assert!(scrape(&up.client, "application/openmetrics-text").contains(&exemplar), "{exemplar}");
    assert!(!scrape(&up.client, "text/plain").contains("trace_id"), "the older format has none");
    let refused = up.refused(3, &["trace", "nobody"]);
    assert!(refused.contains("TRACE_NOT_FOUND") && refused.contains("--keep-spans"), "{refused}");
}

#[test]
fn every_controller_of_a_group_assembles_the_same_trace() {
    let up = RunningCluster::group(None, 2, &["--keep-spans", "1000"]);
    up.apply_digits();
    up.ok(&["invoke", "digits", "--image", &repository(IMAGE), "--request-id", "mine"]);
    let asked = |controller: &str| {
        let output = millrace().args(["trace", "mine", "-o", "json", "-e", controller]).output().unwrap();
        // The processes that answered in time may not have the spans yet.
        output.status.success().then(|| serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    let controllers: Vec<_> = up.parts().into_iter().filter_map(|part| part.controller).collect();
    let from_each = || controllers.iter().map(|(_, address)| asked(address)).collect::<Option<Vec<_>>>();
    let processes = |trace: &serde_json::Value| {
        let spans = trace["spans"].as_array().unwrap().iter();
        spans.map(|span| span["process"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    // The response may arrive before the last span has ended.
    eventually("all three controllers return the same trace of one controller and one worker", || {
        let Some(traces) = from_each() else { return false };
        let seen = processes(&traces[0]);
        let of = |role: &str| seen.iter().filter(|name| name.starts_with(role)).count();
        traces.len() == 3
            && traces.iter().all(|trace| trace["spans"] == traces[0]["spans"])
            && (of("controller-"), of("worker-"), seen.len()) == (1, 1, 2)
    });
}
