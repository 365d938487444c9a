//! The gRPC sender, directly on HTTP/2. The message is already encoded, so no request is encoded or
//! decoded. Only the task that reads the connection stands between the caller and the connection.

use std::cell::{Cell, RefCell};

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version};
use millrace_client::{Address, LatencyBreakdown, TENANT_HEADER, Tensor};
use tokio::net::TcpStream;
use tonic::Status;

use crate::failure::CommandFailure;
use crate::load::payload;
use crate::load::sequence::SequencePosition;
use crate::load::stats::{LoadResponse, Problem};
use crate::load::target::LoadTarget;

const METHOD: &str = "/inference.GRPCInferenceService/ModelInfer";
/// The HTTP/2 receive window of a stream, in bytes: a response of this size arrives without waiting
/// for a window update.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// A fixed number of connections that requests share, spread over the endpoints in turn.
pub(super) struct GrpcSender {
    endpoints: Vec<Endpoint>,
    headers: HeaderMap,
    frame: Bytes,
    connections: Vec<ConnectionSlot>,
}

struct Endpoint {
    authority: String,
    uri: Uri,
}

/// A slot for a connection.
struct ConnectionSlot {
    /// The endpoint of the connection, or of the previous connection if the slot is empty.
    endpoint: Cell<usize>,
    open: RefCell<Option<SendRequest<Bytes>>>,
}

impl GrpcSender {
    /// Opens the connections.
    pub(super) async fn connect(
        target: &LoadTarget,
        tensors: &[Tensor],
        count: usize,
    ) -> Result<Self, CommandFailure> {
        let endpoint = |address: &Address| {
            let authority = address.authority().to_owned();
            let uri = format!("http://{authority}{METHOD}");
            let uri = uri.parse().map_err(|error| CommandFailure::usage(format!("{uri}: {error}")))?;
            Ok(Endpoint { authority, uri })
        };
        let endpoints = target.addresses.iter().map(endpoint).collect::<Result<Vec<_>, CommandFailure>>()?;
        let slot =
            |index| ConnectionSlot { endpoint: Cell::new(index % endpoints.len()), open: RefCell::default() };
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        headers.insert(TENANT_HEADER, header(&target.tenant)?);
        let sender = Self {
            connections: (0..count).map(slot).collect(),
            endpoints,
            headers,
            frame: payload::grpc_frame(target, tensors),
        };
        for slot in &sender.connections {
            sender.open(slot).await.map_err(|problem| CommandFailure::failed(problem.example))?;
        }
        Ok(sender)
    }

    pub(super) fn request_bytes(&self) -> usize {
        self.frame.len()
    }

    /// Sends the request on one of the connections and waits for the response. The next request on
    /// a broken connection opens it again.
    pub(super) async fn send(
        &self,
        slot: usize,
        place: Option<SequencePosition>,
    ) -> Result<LoadResponse, Problem> {
        let slot = &self.connections[slot % self.connections.len()];
        let open = slot.open.borrow().clone();
        let sender = match open {
            Some(sender) => sender,
            None => self.open(slot).await?,
        };
        let frame = match place {
            None => self.frame.clone(),
            Some(place) => payload::grpc_frame_of(&self.frame, place),
        };
        let outcome = self.exchange(sender, &self.endpoints[slot.endpoint.get()].uri, frame).await;
        outcome.map_err(|error| {
            // A reset ends a single request; any other error ends the connection.
            if !error.is_reset() {
                *slot.open.borrow_mut() = None;
            }
            Problem::new("connection lost", error)
        })?
    }

    /// Opens a connection to the slot's last endpoint, or to the next endpoint that can be reached.
    async fn open(&self, slot: &ConnectionSlot) -> Result<SendRequest<Bytes>, Problem> {
        let mut outcome = Err(Problem::new("cannot connect", "no endpoint is configured"));
        let last = slot.endpoint.get();
        for index in (0..self.endpoints.len()).map(|step| (last + step) % self.endpoints.len()) {
            outcome = self.endpoints[index].connect().await;
            if let Ok(sender) = &outcome {
                slot.endpoint.set(index);
                *slot.open.borrow_mut() = Some(sender.clone());
                break;
            }
        }
        outcome
    }

    async fn exchange(
        &self,
        sender: SendRequest<Bytes>,
        uri: &Uri,
        frame: Bytes,
    ) -> Result<Result<LoadResponse, Problem>, h2::Error> {
        let mut sender = sender.ready().await?;
        let (response, mut body) = sender.send_request(self.head(uri), false)?;
        body.send_data(frame, true)?;
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
            return Ok(Err(Problem::new(
                "bad answer",
                "the response ended without a message or without a status",
            )));
        }
        let split = head
            .headers
            .get("server-timing")
            .and_then(|header| LatencyBreakdown::parse(header.to_str().ok()?));
        Ok(Ok(LoadResponse { bytes, split }))
    }

    fn head(&self, uri: &Uri) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.headers.clone();
        request
    }
}

impl Endpoint {
    async fn connect(&self) -> Result<SendRequest<Bytes>, Problem> {
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
        // The requests on the connection report the connection's error.
        tokio::task::spawn_local(async move { connection.await.ok() });
        Ok(sender)
    }
}

/// Returns the error in headers or trailers. Parses the status fully only if it is an error.
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

fn header(text: &str) -> Result<HeaderValue, CommandFailure> {
    HeaderValue::from_str(text).map_err(|error| CommandFailure::usage(format!("{text:?}: {error}")))
}
