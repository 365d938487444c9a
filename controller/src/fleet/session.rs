//! One worker's stream: checks its greeting, registers it, tells it what to serve, and hears what
//! it reports. When the stream ends the worker is not routed to from that moment, and is committed
//! as lost once its lease is over.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use millrace_cluster_state::{Applied, Caller, Command, NodeGpu, NodeStatus};
use millrace_proto::worker as wire;
use millrace_proto::worker::{controller_message, worker_message};
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{Bytes, Epoch, Failure, GpuIndex, NodeName, Reason};
use tonic::{Status, Streaming};

use super::control::Control;
use super::worker::Worker;
use crate::connector;

/// How long a worker may take to greet.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

type Outgoing = Result<wire::ControllerMessage, Status>;

/// Takes a worker in, and returns what it is told from then on.
pub(super) async fn attach(
    control: Control,
    mut incoming: Streaming<wire::WorkerMessage>,
) -> Result<impl Stream<Item = Outgoing> + Send, Failure> {
    let hello = greeting(&mut incoming).await?;
    let name = check(&control, &hello)?;
    // A task of its own: once a registration is proposed, somebody must own what comes of it, even
    // if the caller goes away.
    let entered = tokio::spawn(enter(control.clone(), name, hello, incoming)).await;
    let worker = entered.map_err(|error| Failure::new(Reason::Internal, error.to_string()))??;
    Ok(tell(control, worker))
}

/// Registers a worker and begins to listen to it.
async fn enter(
    control: Control,
    name: NodeName,
    hello: wire::WorkerHello,
    incoming: Streaming<wire::WorkerMessage>,
) -> Result<Arc<Worker>, Failure> {
    // One at a time, so that two processes cannot both find a name free.
    let _entering = control.fleet.entering.lock().await;
    control.fleet.check_name(&name, &hello.instance)?;
    let transport = control
        .connector
        .connect(&name, &hello.address)
        .map_err(|error| Failure::new(Reason::MalformedRequest, error.to_string()))?;
    let epoch = register(&control, &name, &hello).await?;
    let gpus = u32::try_from(hello.gpus.len()).unwrap_or(u32::MAX);
    let worker = Arc::new(Worker::new(name, hello.instance, epoch, gpus, connector::client(transport)));
    tracing::info!(worker = %worker.name, epoch = epoch.0, address = hello.address, build = hello.build, "worker attached");
    control.fleet.attach(worker.clone());
    tokio::spawn(listen(control.clone(), worker.clone(), incoming));
    Ok(worker)
}

async fn greeting(incoming: &mut Streaming<wire::WorkerMessage>) -> Result<wire::WorkerHello, Failure> {
    let malformed = |message: &str| Failure::new(Reason::MalformedRequest, message);
    let first = tokio::time::timeout(HELLO_TIMEOUT, incoming.message())
        .await
        .map_err(|_| Failure::new(Reason::TimedOut, format!("no greeting came within {HELLO_TIMEOUT:?}")))?
        .map_err(|status| millrace_proto::status::from_status(&status))?;
    match first.and_then(|first| first.message) {
        Some(worker_message::Message::Hello(hello)) => Ok(hello),
        _ => Err(malformed("a worker's first message is its greeting")),
    }
}

fn check(control: &Control, hello: &wire::WorkerHello) -> Result<NodeName, Failure> {
    if hello.protocol_version != PROTOCOL_VERSION {
        let message = format!(
            "worker {} speaks protocol {} (build {}) and this controller {PROTOCOL_VERSION} (build {BUILD}): run the same version of both",
            hello.node, hello.protocol_version, hello.build
        );
        return Err(Failure::new(Reason::PeerMismatch, message));
    }
    if !hello.cluster_id.is_empty() && *hello.cluster_id != *control.cluster_id.0 {
        let message = format!(
            "worker {} belongs to cluster {} and this is {}: give it a data directory of its own",
            hello.node, hello.cluster_id, control.cluster_id
        );
        return Err(Failure::new(Reason::PeerMismatch, message));
    }
    NodeName::new(&hello.node).map_err(|error| Failure::new(Reason::InvalidSpec, error.to_string()))
}

/// Registers the worker. An earlier process of its name that is not attached here is declared lost
/// first: its stream has ended, or it died with this controller's last run.
async fn register(control: &Control, name: &NodeName, hello: &wire::WorkerHello) -> Result<Epoch, Failure> {
    let caller = Caller(format!("worker/{name}").into());
    let state = control.replica.state();
    let earlier =
        state.node(name).filter(|node| node.status == NodeStatus::Live && node.instance != hello.instance);
    if let Some(earlier) = earlier {
        let lost = Command::NodeLost { name: name.clone(), epoch: earlier.epoch };
        control.replica.propose(caller.clone(), None, lost).await?;
    }
    let command = Command::RegisterNode {
        name: name.clone(),
        instance: hello.instance.clone(),
        address: hello.address.clone(),
        gpus: hello.gpus.iter().map(gpu).collect(),
        topology: hello.topology.clone(),
        host_memory: Bytes(hello.host_memory_bytes),
    };
    match control.replica.propose(caller, None, command).await? {
        Applied::Registered { epoch } => Ok(epoch),
        other => Err(Failure::new(Reason::Internal, format!("a registration answered {other:?}"))),
    }
}

fn gpu(gpu: &wire::GpuCapacity) -> NodeGpu {
    NodeGpu { index: GpuIndex(gpu.index), gpu_type: gpu.gpu_type.clone(), memory: Bytes(gpu.memory_bytes) }
}

/// Hears the worker until its stream ends.
async fn listen(control: Control, worker: Arc<Worker>, mut incoming: Streaming<wire::WorkerMessage>) {
    let stop = control.stop.clone();
    let ended = stop.run_until_cancelled(hear(&control, &worker, &mut incoming)).await;
    control.fleet.detach(&worker);
    let Some(reason) = ended else { return };
    tracing::warn!(worker = %worker.name, epoch = worker.epoch.0, reason, "worker lost its stream: nothing is routed to it");
    let lease = tokio::time::sleep(control.limits.lease);
    if stop.run_until_cancelled(lease).await.is_some() {
        declare_lost(&control, &worker).await;
    }
}

async fn hear(control: &Control, worker: &Worker, incoming: &mut Streaming<wire::WorkerMessage>) -> String {
    loop {
        let message = tokio::select! {
            message = incoming.message() => message,
            () = worker.lost.cancelled() => return "the worker attached again".into(),
        };
        match message {
            Ok(Some(wire::WorkerMessage { message: Some(message) })) => match message {
                worker_message::Message::Telemetry(telemetry) => worker.report(telemetry),
                worker_message::Message::FunctionStatuses(statuses) => {
                    if worker.report_functions(statuses) {
                        control.fleet.changed();
                    }
                }
                worker_message::Message::Hello(_) => return "it greeted twice".into(),
            },
            // A message of a newer build within the same protocol version.
            Ok(Some(wire::WorkerMessage { message: None })) => {}
            Ok(None) => return "it closed the stream".into(),
            Err(status) => return status.message().to_owned(),
        }
    }
}

/// Commits the loss. If the worker registered again meanwhile, its epoch is another and this
/// changes nothing.
async fn declare_lost(control: &Control, worker: &Worker) {
    let caller = Caller("fleet".into());
    let lost = Command::NodeLost { name: worker.name.clone(), epoch: worker.epoch };
    if let Err(failure) = control.replica.propose(caller, None, lost).await {
        // It stays live in the state until it registers again; nothing is routed to it meanwhile.
        tracing::warn!(worker = %worker.name, error = failure.message, "the loss of a worker is not committed");
    }
}

/// The greeting, then the latest desired state whenever it changed: a worker that reads slowly
/// gets the last one, not all of them.
fn tell(control: Control, worker: Arc<Worker>) -> impl Stream<Item = Outgoing> + Send {
    async_stream::stream! {
        yield Ok(message(controller_message::Message::Hello(wire::ControllerHello {
            cluster_id: control.cluster_id.to_string(),
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            epoch: worker.epoch.0,
        })));
        let mut desired = control.desired.clone();
        desired.mark_changed();
        loop {
            tokio::select! {
                biased;
                () = control.stop.cancelled() => break,
                () = worker.lost.cancelled() => break,
                changed = desired.changed() => if changed.is_err() { break },
            }
            let state = desired.borrow_and_update().clone();
            if let Some(state) = state {
                yield Ok(message(controller_message::Message::DesiredState((*state).clone())));
            }
        }
    }
}

fn message(message: controller_message::Message) -> wire::ControllerMessage {
    wire::ControllerMessage { message: Some(message) }
}
