//! A server on its own port, and clients that show every detail.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use millrace_gateway::{GatewayBuilder, GatewayConfig, GatewayLimits, OpenGateway};
use millrace_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::model_infer_request::InferInputTensor;
use millrace_proto::inference::{InferParameter, ModelInferRequest};
use millrace_proto::status::from_status;
use millrace_types::Reason;
use serde_json::Value as Json;
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::echo::Echo;

pub type Client = GrpcInferenceServiceClient<Channel>;

/// Wall-clock time in every test.
pub const NOW: Duration = Duration::from_millis(1_700_000_000_000);

pub struct Server {
    pub echo: Arc<Echo>,
    pub addr: SocketAddr,
    pub serving: OpenGateway,
}

pub fn config(limits: GatewayLimits) -> GatewayConfig {
    GatewayConfig { limits, ..GatewayConfig::new(Arc::new(|| NOW), 7) }
}

impl Server {
    pub async fn start() -> Self {
        Self::with(GatewayLimits::default()).await
    }

    pub async fn with(limits: GatewayLimits) -> Self {
        Self::of(config(limits), |door| door).await
    }

    pub async fn of(config: GatewayConfig, more: impl FnOnce(GatewayBuilder) -> GatewayBuilder) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let echo = Arc::new(Echo::new());
        let backend = Arc::clone(&echo);
        let serving = more(GatewayBuilder::new(config, backend)).serve(listener).unwrap();
        Self { echo, addr: serving.local_addr(), serving }
    }

    pub async fn channel(&self) -> Channel {
        let endpoint = Channel::from_shared(format!("http://{}", self.addr)).unwrap();
        endpoint.connect().await.unwrap()
    }

    pub async fn grpc(&self) -> Client {
        let client = GrpcInferenceServiceClient::new(self.channel().await);
        client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Reply {
        self.send(Method::POST, path, &[], body.into()).await
    }

    pub async fn post_with(&self, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Reply {
        self.send(Method::POST, path, headers, body.into()).await
    }

    pub async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Bytes) -> Reply {
        let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.exchange(request.body(Full::new(body)).unwrap()).await
    }

    pub async fn exchange<B>(&self, request: Request<B>) -> Reply
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::error::Error + Send + Sync,
    {
        let stream = TcpStream::connect(self.addr).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Reply { status: parts.status, headers: parts.headers, body }
    }
}

/// An HTTP response.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(&self) -> Json {
        assert_eq!(self.header("content-type"), "application/json", "{self:?}");
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Asserts that the response is this error.
    #[track_caller]
    pub fn refuses(&self, status: u16, reason: Reason, says: &str) {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        let json = self.json();
        assert_eq!(json["reason"], reason.as_str(), "{json}");
        assert!(json["error"].as_str().unwrap().contains(says), "{json} does not say {says:?}");
    }
}

/// Asserts that the status is this refusal.
#[track_caller]
pub fn refuses(status: &Status, code: Code, reason: Reason, says: &str) {
    assert_eq!(status.code(), code, "{status:?}");
    assert_eq!(from_status(status).reason, reason, "{status:?}");
    assert!(status.message().contains(says), "{:?} does not say {says:?}", status.message());
}

pub fn fp32(elements: &[f32]) -> Bytes {
    elements.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.into(),
        ..InferInputTensor::default()
    }
}

/// Returns a request with a raw FP32 input of shape [1, 64], which "mlp" and similar models accept.
pub fn row(model: &str) -> ModelInferRequest {
    ModelInferRequest {
        model_name: model.into(),
        inputs: vec![input("x", "FP32", &[1, 64])],
        raw_input_contents: vec![fp32(&[0.5; 64])],
        ..ModelInferRequest::default()
    }
}

/// Returns a request to "slow", which responds after `ms` milliseconds.
pub fn wait(ms: i64) -> ModelInferRequest {
    ModelInferRequest {
        model_name: "slow".into(),
        inputs: vec![input("ms", "INT64", &[1])],
        raw_input_contents: vec![Bytes::copy_from_slice(&ms.to_le_bytes())],
        ..ModelInferRequest::default()
    }
}

pub fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}
