//! One stream to one controller, opened again for as long as the process lives.

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

/// As the real worker's.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long between two attempts, in milliseconds.
const RECONNECT_MS: std::ops::Range<u64> = 50..1_000;
/// Messages on their way to the transport. What is beyond is said again, or is old by then.
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
        // Whatever ended it: it is opened again.
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
    outgoing.try_send(wire::WorkerMessage { message: Some(hello) }).expect("room for a greeting");
    let mut client = control_client(channel);
    let greeting = async {
        let mut incoming = client.attach(ReceiverStream::new(messages)).await?.into_inner();
        match incoming.message().await?.and_then(|first| first.message) {
            Some(Message::Hello(hello)) => Ok((hello, incoming)),
            other => Err(Status::internal(format!("a controller greets first, and said {other:?}"))),
        }
    };
    let greeted = timeout(HELLO_TIMEOUT, greeting).await;
    let (hello, mut incoming) = greeted.map_err(|_| Status::deadline_exceeded("no greeting"))??;
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
                    // As the real worker.
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
