//! Sending over gRPC, straight on HTTP/2: the message is bytes already, so nothing is encoded or
//! decoded, and no task stands between the caller and the connection but the one that reads it.

use std::cell::RefCell;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version};
use millrace_client::{Split, TENANT_HEADER, Tensor};
use tokio::net::TcpStream;
use tonic::Status;

use crate::failure::Failure;
use crate::load::payload;
use crate::load::stats::{Answer, Problem};
use crate::load::target::Target;

const METHOD: &str = "/inference.GRPCInferenceService/ModelInfer";
/// HTTP/2 receive windows: an answer of this size arrives without waiting for a window update.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// A fixed number of connections that requests share.
pub(super) struct Sender {
    authority: String,
    uri: Uri,
    headers: HeaderMap,
    frame: Bytes,
    connections: Vec<RefCell<Option<SendRequest<Bytes>>>>,
}

impl Sender {
    /// Opens the connections.
    pub(super) async fn connect(target: &Target, tensors: &[Tensor], count: usize) -> Result<Self, Failure> {
        let authority = target.address.authority().to_owned();
        let uri = format!("http://{authority}{METHOD}");
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        headers.insert(TENANT_HEADER, header(&target.tenant)?);
        let sender = Self {
            uri: uri.parse().map_err(|error| Failure::usage(format!("{uri}: {error}")))?,
            headers,
            frame: payload::grpc_frame(target, tensors),
            connections: std::iter::repeat_with(RefCell::default).take(count).collect(),
            authority,
        };
        for slot in 0..count {
            sender.open(slot).await.map_err(|problem| Failure::failed(problem.example))?;
        }
        Ok(sender)
    }

    pub(super) fn request_bytes(&self) -> usize {
        self.frame.len()
    }

    /// Sends the request on one of the connections and waits for its answer. A connection that
    /// breaks is opened again by the next request on it.
    pub(super) async fn send(&self, slot: usize) -> Result<Answer, Problem> {
        let slot = slot % self.connections.len();
        let open = self.connections[slot].borrow().clone();
        let sender = match open {
            Some(sender) => sender,
            None => self.open(slot).await?,
        };
        let outcome = self.exchange(sender).await;
        outcome.map_err(|error| {
            // A reset ends one request; anything else, the connection.
            if !error.is_reset() {
                *self.connections[slot].borrow_mut() = None;
            }
            Problem::new("connection lost", error)
        })?
    }

    async fn open(&self, slot: usize) -> Result<SendRequest<Bytes>, Problem> {
        let failed = |error: String| {
            Problem::new("cannot connect", format!("cannot connect to {}: {error}", self.authority))
        };
        let stream = TcpStream::connect(&self.authority).await.map_err(|error| failed(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
        let handshake = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake::<_, Bytes>(stream);
        let (sender, connection) = handshake.await.map_err(|error| failed(error.to_string()))?;
        // What ends a connection is told to the requests on it.
        tokio::task::spawn_local(async move { connection.await.ok() });
        *self.connections[slot].borrow_mut() = Some(sender.clone());
        Ok(sender)
    }

    async fn exchange(&self, sender: SendRequest<Bytes>) -> Result<Result<Answer, Problem>, h2::Error> {
        let mut sender = sender.ready().await?;
        let (response, mut body) = sender.send_request(self.head(), false)?;
        body.send_data(self.frame.clone(), true)?;
        let (head, mut body) = response.await?.into_parts();
        if let Some(problem) = problem_in(&head.headers) {
            return Ok(Err(problem));
        }
        let mut bytes = 0;
        while let Some(chunk) = body.data().await {
            let chunk = chunk?.len();
            bytes += chunk;
            body.flow_control().release_capacity(chunk)?;
        }
        let trailers = body.trailers().await?.unwrap_or_default();
        if let Some(problem) = problem_in(&trailers) {
            return Ok(Err(problem));
        }
        if !trailers.contains_key(Status::GRPC_STATUS) || bytes == 0 {
            return Ok(Err(Problem::new("bad answer", "it ended without a message or without a status")));
        }
        let split = head.headers.get("server-timing").and_then(|header| Split::parse(header.to_str().ok()?));
        Ok(Ok(Answer { bytes, split }))
    }

    fn head(&self) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// The problem that headers or trailers tell of. Reads them fully only when they do.
fn problem_in(headers: &HeaderMap) -> Option<Problem> {
    if headers.get(Status::GRPC_STATUS)? == "0" {
        return None;
    }
    let status = Status::from_header_map(headers)?;
    let kind = match status.details() {
        [] => format!("{:?}", status.code()),
        _ => format!("{:?} ({})", status.code(), millrace_proto::status::from_status(&status).reason),
    };
    Some(Problem::new(kind, status.message()))
}

fn header(text: &str) -> Result<HeaderValue, Failure> {
    HeaderValue::from_str(text).map_err(|error| Failure::usage(format!("{text:?}: {error}")))
}
