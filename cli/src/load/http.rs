//! The HTTP/1.1 sender. Each request in flight has a connection of its own, and connections are
//! reused.

use std::cell::RefCell;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use millrace_client::{LatencyBreakdown, ModelMetadata, TENANT_HEADER, Tensor, TensorMetadata};
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::failure::{CommandFailure, ExitStatus};
use crate::load::args::HttpTensorEncoding;
use crate::load::payload::{self, HttpBody};
use crate::load::sequence::SequencePosition;
use crate::load::stats::{LoadResponse, Problem};
use crate::load::target::LoadTarget;

/// The header with the length of a body's JSON part, after which the binary data begins.
const JSON_BYTES: &str = "inference-header-content-length";

/// The connections, opened on demand.
pub(super) struct HttpSender {
    authority: String,
    uri: Uri,
    headers: HeaderMap,
    body: HttpBody,
    idle: RefCell<Vec<SendRequest<Full<Bytes>>>>,
}

impl HttpSender {
    /// Opens the first connection.
    pub(super) async fn connect(
        target: &LoadTarget,
        tensors: &[Tensor],
        wire: HttpTensorEncoding,
    ) -> Result<Self, CommandFailure> {
        let body = payload::http_body(tensors, wire)?;
        let mut headers = common_headers(target)?;
        match body.json_bytes {
            Some(json_bytes) => {
                headers.insert(JSON_BYTES, HeaderValue::from(json_bytes));
                headers.insert("content-type", HeaderValue::from_static("application/octet-stream"));
            }
            None => {
                headers.insert("content-type", HeaderValue::from_static("application/json"));
            }
        }
        let sender = Self {
            authority: only(target)?.to_owned(),
            uri: path(target, "/infer")?,
            headers,
            body,
            idle: RefCell::default(),
        };
        let first =
            open(&sender.authority).await.map_err(|problem| CommandFailure::failed(problem.example))?;
        sender.idle.borrow_mut().push(first);
        Ok(sender)
    }

    pub(super) fn request_bytes(&self) -> usize {
        self.body.bytes.len()
    }

    /// Sends the request on an idle or new connection, and waits for the response.
    pub(super) async fn send(&self, place: Option<SequencePosition>) -> Result<LoadResponse, Problem> {
        let idle = self.idle.borrow_mut().pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => open(&self.authority).await?,
        };
        let lost = |error: hyper::Error| Problem::new("connection lost", error);
        connection.ready().await.map_err(lost)?;
        let body = match place {
            None => self.body.clone(),
            Some(place) => self.body.of_sequence(place),
        };
        let mut request = Request::new(Full::new(body.bytes));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        if let Some(json_bytes) = body.json_bytes.filter(|_| place.is_some()) {
            request.headers_mut().insert(JSON_BYTES, HeaderValue::from(json_bytes));
        }
        let (head, body) = connection.send_request(request).await.map_err(lost)?.into_parts();
        if head.status != StatusCode::OK {
            let text = body.collect().await.map_err(lost)?.to_bytes();
            self.idle.borrow_mut().push(connection);
            return Err(problem(head.status, &text));
        }
        let bytes = drain(body).await.map_err(lost)?;
        self.idle.borrow_mut().push(connection);
        let split = head
            .headers
            .get("server-timing")
            .and_then(|header| LatencyBreakdown::parse(header.to_str().ok()?));
        Ok(LoadResponse { bytes, split })
    }
}

/// Fetches the declared inputs and outputs of a model over HTTP.
pub(super) async fn metadata(target: &LoadTarget) -> Result<ModelMetadata, CommandFailure> {
    let unreachable = |problem: Problem| {
        let hint = "give the address of a running server of the Open Inference Protocol";
        CommandFailure { exit: ExitStatus::Unreachable, ..CommandFailure::failed(problem.example) }.hint(hint)
    };
    let mut connection = open::<Empty<Bytes>>(only(target)?).await.map_err(unreachable)?;
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = path(target, "")?;
    *request.headers_mut() = common_headers(target)?;
    let lost = |error: hyper::Error| CommandFailure::failed(format!("{}: {error}", target.names()));
    let (head, body) = connection.send_request(request).await.map_err(lost)?.into_parts();
    let text = body.collect().await.map_err(lost)?.to_bytes();
    if head.status != StatusCode::OK {
        let exit =
            if head.status == StatusCode::NOT_FOUND { ExitStatus::NotFound } else { ExitStatus::Failed };
        let problem = problem(head.status, &text);
        return Err(CommandFailure {
            exit,
            ..CommandFailure::failed(format!("{}: {}", problem.kind, problem.example))
        });
    }
    read_metadata(&text)
        .map_err(|error| CommandFailure::failed(format!("the server's metadata is malformed: {error}")))
}

/// Returns the only server: over HTTP, a URL names the server.
fn only(target: &LoadTarget) -> Result<&str, CommandFailure> {
    let address = target.addresses.first().ok_or_else(|| CommandFailure::usage("no server URL is given"))?;
    Ok(address.authority())
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    versions: Vec<String>,
    #[serde(default)]
    platform: String,
    inputs: Vec<TensorDeclaration>,
    #[serde(default)]
    outputs: Vec<TensorDeclaration>,
}

#[derive(Deserialize)]
struct TensorDeclaration {
    name: String,
    datatype: String,
    shape: Vec<i64>,
}

fn read_metadata(json: &[u8]) -> Result<ModelMetadata, String> {
    let read: Metadata = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let tensor = |tensor: TensorDeclaration| {
        let datatype = tensor
            .datatype
            .parse()
            .map_err(|error: millrace_types::tensor::UnknownDataType| error.to_string())?;
        Ok(TensorMetadata { name: tensor.name, datatype, shape: tensor.shape })
    };
    Ok(ModelMetadata {
        name: read.name,
        versions: read.versions,
        platform: read.platform,
        inputs: read.inputs.into_iter().map(tensor).collect::<Result<_, String>>()?,
        outputs: read.outputs.into_iter().map(tensor).collect::<Result<_, String>>()?,
    })
}

async fn open<B>(authority: &str) -> Result<SendRequest<B>, Problem>
where
    B: Body<Data = Bytes, Error = std::convert::Infallible> + 'static,
{
    let failed =
        |error: String| Problem::new("cannot connect", format!("cannot connect to {authority}: {error}"));
    let stream = TcpStream::connect(authority).await.map_err(|error| failed(error.to_string()))?;
    stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
    let (sender, connection) =
        handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.to_string()))?;
    // The request on the connection reports the connection's error.
    tokio::task::spawn_local(async move { connection.await.ok() });
    Ok(sender)
}

async fn drain(mut body: Incoming) -> Result<usize, hyper::Error> {
    let mut bytes = 0;
    while let Some(frame) = body.frame().await {
        bytes += frame?.data_ref().map_or(0, Bytes::len);
    }
    Ok(bytes)
}

/// Returns the error in an error response: `{"error": …}`, with a reason if the server is Millrace.
fn problem(status: StatusCode, body: &[u8]) -> Problem {
    #[derive(Deserialize)]
    struct ErrorBody {
        error: String,
        reason: Option<String>,
    }
    let number = status.as_u16();
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(ErrorBody { error, reason: Some(reason) }) => {
            Problem::new(format!("HTTP {number} ({reason})"), error)
        }
        Ok(ErrorBody { error, reason: None }) => Problem::new(format!("HTTP {number}"), error),
        Err(_) => Problem::new(format!("HTTP {number}"), String::from_utf8_lossy(body)),
    }
}

fn path(target: &LoadTarget, end: &str) -> Result<Uri, CommandFailure> {
    let version = match target.version.as_str() {
        "" => String::new(),
        version => format!("/versions/{version}"),
    };
    let path = format!("/v2/models/{}{version}{end}", target.model);
    path.parse().map_err(|error| CommandFailure::usage(format!("{path}: {error}")))
}

fn common_headers(target: &LoadTarget) -> Result<HeaderMap, CommandFailure> {
    let header = |text: &str| {
        HeaderValue::from_str(text).map_err(|error| CommandFailure::usage(format!("{text:?}: {error}")))
    };
    let mut headers = HeaderMap::new();
    headers.insert("host", header(only(target)?)?);
    headers.insert(TENANT_HEADER, header(&target.tenant)?);
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_bodies_are_parsed_with_and_without_a_reason() {
        let check = |body: &str| problem(StatusCode::TOO_MANY_REQUESTS, body.as_bytes());
        let ours = check(r#"{"error": "full", "reason": "QUEUE_FULL", "retryable": true}"#);
        assert_eq!(ours, Problem::new("HTTP 429 (QUEUE_FULL)", "full"));
        assert_eq!(check(r#"{"error": "full"}"#), Problem::new("HTTP 429", "full"));
        assert_eq!(check("slow down"), Problem::new("HTTP 429", "slow down"));
    }

    #[test]
    fn metadata_is_read_from_the_protocols_json() {
        let json = br#"{"name": "m", "versions": ["1"], "platform": "p", "extra": 1,
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}], "outputs": []}"#;
        assert_eq!(read_metadata(json).unwrap().inputs[0].shape, [-1, 64]);
        assert!(
            read_metadata(br#"{"name": "m", "inputs": [{"name": "x", "datatype": "F", "shape": []}]}"#)
                .is_err()
        );
    }
}
