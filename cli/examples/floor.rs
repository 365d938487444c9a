//! A server of the inference protocol that does nothing: every request gets the same answer at
//! once. What `millrace load` measures of it is the load generator's own cost, the floor under
//! every other figure.
//!
//! ```text
//! cargo run --release -p millrace-cli --example floor          # prints its address
//! millrace load --url grpc://ADDRESS --model floor
//! ```

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response};
use millrace_proto::inference::model_infer_response::InferOutputTensor;
use millrace_proto::inference::model_metadata_response::TensorMetadata;
use millrace_proto::inference::{ModelInferResponse, ModelMetadataResponse};
use prost::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

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

async fn serve(stream: TcpStream, answers: Answers) -> Result<(), h2::Error> {
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
