//! A server of the inference protocol, over gRPC and HTTP, that answers every request at once with
//! the same response. `millrace load` measures with this server the load generator's own cost, the
//! lower bound of every other figure.
//!
//! ```text
//! cargo run --release -p millrace-cli --example floor          # prints its address
//! millrace load --url grpc://ADDRESS --model floor            # or http://ADDRESS
//! ```

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use millrace_proto::inference::model_infer_response::InferOutputTensor;
use millrace_proto::inference::model_metadata_response::TensorMetadata;
use millrace_proto::inference::{ModelInferResponse, ModelMetadataResponse};
use prost::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

const HTTP_METADATA: &[u8] = br#"{"name":"floor","inputs":[{"name":"x","datatype":"FP32","shape":[-1,64]}]}"#;
const HTTP_ANSWER: &[u8] = &[b' '; 400];

/// The encoded gRPC responses.
#[derive(Clone)]
struct Answers {
    metadata: Bytes,
    infer: Bytes,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let answers = Answers { metadata: frame(&metadata()), infer: frame(&infer()) };
    LocalSet::new()
        .run_until(async {
            loop {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let answers = answers.clone();
                tokio::task::spawn_local(async move {
                    if let Err(error) = serve(stream, answers).await {
                        eprintln!("connection: {error}");
                    }
                });
            }
        })
        .await
}

/// Distinguishes the protocols by the first bytes of HTTP/2: `PRI * HTTP/2.0`.
async fn serve(stream: TcpStream, answers: Answers) -> Result<(), Box<dyn std::error::Error>> {
    let mut first = [0; 3];
    while stream.peek(&mut first).await? < first.len() {
        if stream.peek(&mut first).await? == 0 {
            return Ok(());
        }
        tokio::task::yield_now().await;
    }
    if first == *b"PRI" {
        serve_grpc(stream, answers).await?
    } else {
        serve_http(stream).await?
    }
    Ok(())
}

async fn serve_http(stream: TcpStream) -> Result<(), hyper::Error> {
    let service = service_fn(async |request: Request<Incoming>| {
        let metadata = request.method() == Method::GET;
        request.into_body().collect().await?;
        let body = Bytes::from_static(if metadata { HTTP_METADATA } else { HTTP_ANSWER });
        Ok::<_, hyper::Error>(Response::new(Full::new(body)))
    });
    http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
}

async fn serve_grpc(stream: TcpStream, answers: Answers) -> Result<(), h2::Error> {
    let mut connection = h2::server::Builder::new()
        .initial_window_size(4 << 20)
        .initial_connection_window_size(16 << 20)
        .max_concurrent_streams(10_000)
        .handshake::<_, Bytes>(stream)
        .await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        let answers = answers.clone();
        tokio::task::spawn_local(async move { answer(request, respond, &answers).await.ok() });
    }
    Ok(())
}

async fn answer(
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
    answers: &Answers,
) -> Result<(), h2::Error> {
    let metadata = request.uri().path().ends_with("/ModelMetadata");
    let mut body = request.into_body();
    while let Some(chunk) = body.data().await {
        let bytes = chunk?.len();
        body.flow_control().release_capacity(bytes)?;
    }
    let mut response = Response::new(());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    let mut stream = respond.send_response(response, false)?;
    stream.send_data(if metadata { answers.metadata.clone() } else { answers.infer.clone() }, false)?;
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    stream.send_trailers(trailers)
}

fn frame(message: &impl Message) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX));
    frame.put_slice(&message.encode_to_vec());
    frame.freeze()
}

fn metadata() -> ModelMetadataResponse {
    let tensor =
        |name: &str| TensorMetadata { name: name.into(), datatype: "FP32".into(), shape: vec![-1, 64] };
    ModelMetadataResponse {
        name: "floor".into(),
        versions: vec!["1".into()],
        platform: "none".into(),
        inputs: vec![tensor("x")],
        outputs: vec![tensor("y")],
    }
}

fn infer() -> ModelInferResponse {
    let output = InferOutputTensor {
        name: "y".into(),
        datatype: "FP32".into(),
        shape: vec![1, 64],
        ..Default::default()
    };
    ModelInferResponse {
        model_name: "floor".into(),
        model_version: "1".into(),
        outputs: vec![output],
        raw_output_contents: vec![Bytes::from_static(&[0; 256])],
        ..Default::default()
    }
}
