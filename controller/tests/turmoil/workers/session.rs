//! A stream to one controller, which is opened again as long as the process lives.

use std::rc::Rc;
use std::time::Duration;

use millrace_proto::parts::{ItemSet, PartAssembler, PartError, control_client};
use millrace_proto::worker as wire;
use millrace_proto::worker::controller_message::Message;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::process::Process;
use crate::group::{INTERNAL_PORT, host};
use crate::network::dial;

/// The connect timeout of a real worker.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two attempts, in milliseconds.
const RECONNECT_MS: std::ops::Range<u64> = 50..1_000;
/// Messages queued for the transport. Further messages are dropped; the sender repeats the messages
/// later, or the messages become outdated.
const OUTGOING_MAX: usize = 32;

pub(super) async fn run(process: Rc<Process>, controller: u64, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let endpoint = Endpoint::from_shared(format!("http://{}:{INTERNAL_PORT}", host(controller))).unwrap();
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    let channel = dial(&endpoint);
    loop {
        let stream = process.next_stream();
        // Open the stream again after any error.
        if let Err(status) = converse(&process, controller, stream, channel.clone()).await {
            tracing::debug!(controller, stream, %status, "a stream ended");
        }
        process.detached(stream);
        sleep(Duration::from_millis(rng.random_range(RECONNECT_MS))).await;
        process.until_awake().await;
    }
}

async fn converse(process: &Process, controller: u64, stream: u64, channel: Channel) -> Result<(), Status> {
    let (outgoing, messages) = mpsc::channel(OUTGOING_MAX);
    let hello = wire::worker_message::Message::Hello(process.greeting());
    outgoing
        .try_send(wire::WorkerMessage { message: Some(hello) })
        .expect("an empty channel accepts the hello");
    let mut client = control_client(channel);
    let greeting = async {
        let mut incoming = client.attach(ReceiverStream::new(messages)).await?.into_inner();
        match incoming.message().await?.and_then(|first| first.message) {
            Some(Message::Hello(hello)) => Ok((hello, incoming)),
            other => {
                Err(Status::internal(format!("a controller must send its hello first, and sent {other:?}")))
            }
        }
    };
    let greeted = timeout(HELLO_TIMEOUT, greeting).await;
    let (hello, mut incoming) = greeted.map_err(|_| Status::deadline_exceeded("no hello"))??;
    process.until_awake().await;
    process.attached(stream, outgoing, hello.epoch);
    let mut parts = PartAssembler::default();
    let mut complete = ItemSet::default();
    let broken = |error: PartError| Status::internal(error.to_string());
    while let Some(message) = incoming.message().await? {
        process.until_awake().await;
        match message.message {
            Some(Message::Registration(wire::Registration { epoch })) => process.registered(epoch),
            Some(Message::Leadership(wire::Leadership { term, leads })) => {
                if !leads {
                    // Drop this stream's desired state, like a real worker.
                    parts.forget();
                }
                process.led(stream, term, leads);
            }
            Some(Message::DesiredState(part)) => {
                if let Some(update) = parts.take(part).map_err(broken)? {
                    complete.apply(update).map_err(broken)?;
                    process.told(controller, stream, &complete);
                }
            }
            Some(Message::CheckpointAck(ack)) => process.acknowledged(&ack),
            Some(Message::Hello(_)) | None => {}
        }
    }
    Ok(())
}
