//! The peak memory of a server under requests that are made to need much memory.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use millrace_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use millrace_proto::inference::model_infer_request::InferInputTensor;
use millrace_proto::inference::{InferTensorContents, ModelInferRequest};
use tonic::Code;
use tonic::codec::CompressionEncoding;
use tonic::transport::Channel;

use crate::running::{PATIENCE, RunningCluster};

/// The size of a message after decompression, in bytes.
const MESSAGE_BYTES: usize = 2 << 20;
/// The limit by which a message of that size may raise the peak, in bytes.
const RISE_MAX: usize = 4 * MESSAGE_BYTES + (32 << 20);

/// Returns a server's memory in bytes, by the kernel's name for it.
fn memory(up: &RunningCluster, name: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", up.pid())).expect("the server runs");
    let line = status.lines().find(|line| line.starts_with(name)).expect("the kernel reports it");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") << 10
}

#[test]
fn servers_use_no_huge_pages_and_their_executors_may() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    up.apply_digits();
    let huge_pages = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
        let line =
            status.lines().find(|line| line.starts_with("THP_enabled:")).expect("the kernel reports it");
        line.ends_with('1')
    };
    assert!(!huge_pages(up.pid()));
    let executors = up.executors();
    assert!(!executors.is_empty());
    for executor in executors {
        assert!(huge_pages(executor), "executor {executor}");
    }
}

/// Returns the peak during `send` above the memory before, in bytes.
fn rise(up: &RunningCluster, send: impl FnOnce()) -> usize {
    std::fs::write(format!("/proc/{}/clear_refs", up.pid()), "5").expect("the server is ours");
    let before = memory(up, "VmRSS");
    send();
    memory(up, "VmHWM").saturating_sub(before)
}

/// Sends an inference over REST. Returns the status.
fn infer(up: &RunningCluster, body: &str) -> u16 {
    let mut stream = TcpStream::connect(&up.client).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "POST /v2/models/digits/infer HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        up.client,
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split_whitespace().nth(1).and_then(|status| status.parse().ok()).expect("a status")
}

fn digits(shape: &str, data: &str) -> String {
    format!(r#"{{"inputs":[{{"name":"image","datatype":"FP32","shape":{shape},"data":[{data}]}}]}}"#)
}

fn assert_serves(up: &RunningCluster) {
    assert_eq!(infer(up, &digits("[1,1,8,8]", &["0"; 64].join(","))), 200);
}

fn grpc_refusal(
    up: &RunningCluster,
    request: ModelInferRequest,
    encoding: Option<CompressionEncoding>,
) -> Code {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = Channel::from_shared(format!("http://{}", up.client)).unwrap();
        let mut client = GrpcInferenceServiceClient::new(endpoint.connect().await.unwrap());
        if let Some(encoding) = encoding {
            client = client.send_compressed(encoding);
        }
        client.model_infer(request).await.unwrap_err().code()
    })
}

/// Returns a request with `MESSAGE_BYTES` of tensors without fields.
fn empty_tensors() -> ModelInferRequest {
    let inputs = vec![InferInputTensor::default(); MESSAGE_BYTES / 2];
    ModelInferRequest { inputs, ..ModelInferRequest::default() }
}

#[test]
fn a_request_takes_memory_in_proportion_to_its_bytes() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    up.apply_digits();
    // Warm up: the first request of each kind makes permanent allocations.
    assert_serves(&up);
    assert_eq!(
        grpc_refusal(&up, ModelInferRequest::default(), Some(CompressionEncoding::Gzip)),
        Code::NotFound
    );

    let plain = rise(&up, || {
        assert_eq!(grpc_refusal(&up, empty_tensors(), None), Code::InvalidArgument);
    });
    let gzip = rise(&up, || {
        let refused = grpc_refusal(&up, empty_tensors(), Some(CompressionEncoding::Gzip));
        assert_eq!(refused, Code::InvalidArgument);
    });
    let json = rise(&up, || {
        let zeros = "0,".repeat(MESSAGE_BYTES / 2);
        assert_eq!(infer(&up, &format!(r#"{{"inputs":[],"parameters":{{"p":[{zeros}0]}}}}"#)), 400);
    });
    let typed = rise(&up, || {
        let contents = InferTensorContents { int64_contents: vec![1; MESSAGE_BYTES], ..Default::default() };
        let tensor = InferInputTensor { contents: Some(contents), ..InferInputTensor::default() };
        let request = ModelInferRequest { inputs: vec![tensor], ..ModelInferRequest::default() };
        assert_eq!(grpc_refusal(&up, request, None), Code::ResourceExhausted);
    });
    // The shape stands for 2^48 bytes.
    let shape = rise(&up, || assert_eq!(infer(&up, &digits("[1099511627776,1,8,8]", "0")), 400));
    let rises = [("plain", plain), ("gzip", gzip), ("json", json), ("typed", typed), ("shape", shape)];
    eprintln!("the peak rose by {rises:?} bytes");
    for (request, rise) in rises {
        assert!(rise <= RISE_MAX, "{request}: {rise} bytes for a message of {MESSAGE_BYTES}");
    }
    assert_serves(&up);
}
