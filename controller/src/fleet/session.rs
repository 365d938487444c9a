//! Attaches a worker: checks the hello, registers the worker in the state, and starts both directions
//! of the stream.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use millrace_proto::parts::cut_text;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{Epoch, Failure, NodeName, Reason};
use tokio::sync::mpsc;
use tonic::Streaming;

use super::control::WorkerControlService;
use super::worker::AttachedWorker;
use super::{checkpoints, hear, registration, tell};

/// The longest wait for a worker's hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Attaches a worker, and returns the stream of messages to the worker.
pub(super) async fn attach(
    control: WorkerControlService,
    mut incoming: Streaming<wire::WorkerMessage>,
) -> Result<impl Stream<Item = tell::WorkerUpdate> + Send, Failure> {
    let hello = greeting(&mut incoming).await?;
    let name = check(&control, &hello)?;
    // Run in a separate task: after the proposal of the registration, the attachment must complete even
    // if the caller goes away.
    let entered = tokio::spawn(enter(control.clone(), name, hello, incoming)).await;
    let (worker, acks) = entered.map_err(|error| Failure::new(Reason::Internal, error.to_string()))??;
    Ok(tell::tell(control, worker, acks))
}

/// Registers a worker and starts to receive messages. Returns the acknowledgements of the checkpoints.
async fn enter(
    control: WorkerControlService,
    name: NodeName,
    hello: wire::WorkerHello,
    incoming: Streaming<wire::WorkerMessage>,
) -> Result<(Arc<AttachedWorker>, mpsc::Receiver<wire::CheckpointAck>), Failure> {
    let transport = {
        let _entered = control.requests.enter();
        control.connector.connect(&name, &hello.address)
    };
    let transport = transport.map_err(|error| Failure::malformed(error.to_string()))?;
    let epoch = registration::register(&control.replica, &name, &hello, Epoch(hello.seen_epoch)).await?;
    let worker = Arc::new(AttachedWorker::new(name, hello, epoch, transport, control.fleet.now()));
    tracing::info!(worker = %worker.name, epoch = epoch.0, address = worker.hello.address, build = worker.hello.build, "worker attached");
    control.fleet.attach(worker.clone());
    // The state may have changed since the worker got its epoch.
    registration::follow(&control.fleet, &control.replica.state());
    let (checkpoints, acks) = checkpoints::open(control.clone(), worker.clone());
    tokio::spawn(hear::listen(control, worker.clone(), incoming, checkpoints));
    Ok((worker, acks))
}

async fn greeting(incoming: &mut Streaming<wire::WorkerMessage>) -> Result<wire::WorkerHello, Failure> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, incoming.message())
        .await
        .map_err(|_| {
            Failure::new(Reason::TimedOut, format!("the worker sent no hello within {HELLO_TIMEOUT:?}"))
        })?
        .map_err(|status| millrace_proto::status::from_status(&status))?;
    match first.and_then(|first| first.message) {
        Some(worker_message::Message::Hello(mut hello)) => {
            if let Some(broke) = &mut hello.stream_break {
                cut_text(&mut broke.why);
            }
            Ok(hello)
        }
        _ => Err(Failure::malformed("a worker's first message must be its hello")),
    }
}

fn check(control: &WorkerControlService, hello: &wire::WorkerHello) -> Result<NodeName, Failure> {
    if hello.protocol_version != PROTOCOL_VERSION {
        let message = format!(
            "worker {} speaks protocol {} (build {}), and this controller speaks {PROTOCOL_VERSION} (build {BUILD}): run the same version of both",
            hello.node, hello.protocol_version, hello.build
        );
        return Err(Failure::new(Reason::PeerMismatch, message));
    }
    if !hello.cluster_id.is_empty() && *hello.cluster_id != *control.cluster_id.0 {
        let message = format!(
            "worker {} belongs to cluster {}, and this is cluster {}: give that worker a data directory of its own",
            hello.node, hello.cluster_id, control.cluster_id
        );
        return Err(Failure::new(Reason::PeerMismatch, message));
    }
    NodeName::new(&hello.node).map_err(|error| Failure::new(Reason::InvalidSpec, error.to_string()))
}
