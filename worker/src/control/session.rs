//! One stream to one controller: greets, tells it what this worker does, and obeys what it says.
//! Lost streams are opened again for as long as the worker lives.
//!
//! What goes out is pulled by the transport from two `watch` channels, so nothing queues here: a
//! controller that reads slowly gets the latest telemetry, not all of it.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream};
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_proto::worker::{controller_message, worker_message};
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{ClusterId, Epoch, Reason};
use tokio::sync::{oneshot, watch};
use tonic::Streaming;
use tonic::transport::Channel;

use super::Refused;
use super::desired::{self, Desired};
use crate::backoff::Backoff;
use crate::data_dir::{self, DataDir};

/// How long a controller may take to greet back.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The first wait before a stream is opened again.
const RECONNECT_BASE: Duration = Duration::from_millis(50);
/// The longest wait between attempts.
const RECONNECT_CEILING: Duration = Duration::from_secs(2);

/// What all sessions of a worker share.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    /// The greeting; the cluster's id is filled in when it is sent.
    pub hello: wire::WorkerHello,
    pub data_dir: DataDir,
    pub desired: watch::Sender<Desired>,
    pub statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    pub telemetry: watch::Receiver<Arc<wire::Telemetry>>,
    pub epoch: watch::Sender<Option<Epoch>>,
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("{0}")]
    Status(#[from] tonic::Status),
    #[error("the controller closed the stream")]
    Closed,
    #[error("the controller did not greet within {HELLO_TIMEOUT:?}")]
    NoHello,
    #[error("the controller greeted with something else")]
    NotHello,
    #[error(
        "the controller speaks protocol {theirs} (build {build}) and this worker {PROTOCOL_VERSION}: run the same version of both"
    )]
    Protocol { theirs: u32, build: String },
    #[error(transparent)]
    DataDir(#[from] data_dir::Error),
}

/// Keeps a stream to one controller open. Returns only when this worker may not go on at all.
pub(super) async fn run(shared: Shared, address: String, channel: Channel, seed: u64) -> Refused {
    let mut backoff = Backoff::new(RECONNECT_BASE, RECONNECT_CEILING, seed);
    loop {
        let mut greeted = false;
        let ended = attach(&shared, channel.clone(), &mut greeted).await;
        if let Some(refused) = fatal(&shared, &address, &ended) {
            return refused;
        }
        if greeted {
            backoff.succeeded();
        }
        let wait = backoff.failed();
        tracing::warn!(controller = %address, reason = %ended, ?wait, "no stream to the controller: serving goes on");
        tokio::time::sleep(wait).await;
    }
}

/// A controller that takes this worker for a stranger ends it, unless another one took it in: then
/// the group is being changed, and what is served is served on.
fn fatal(shared: &Shared, address: &str, ended: &Ended) -> Option<Refused> {
    if shared.epoch.borrow().is_some() {
        return None;
    }
    let message = match ended {
        Ended::DataDir(error @ data_dir::Error::OtherCluster { .. }) => error.to_string(),
        Ended::Protocol { .. } => ended.to_string(),
        Ended::Status(status) => {
            let failure = millrace_proto::status::from_status(status);
            if failure.reason != Reason::PeerMismatch {
                return None;
            }
            failure.message
        }
        _ => return None,
    };
    Some(Refused { controller: address.to_owned(), message })
}

async fn attach(shared: &Shared, channel: Channel, greeted: &mut bool) -> Ended {
    match converse(shared, channel, greeted).await {
        Err(ended) => ended,
        Ok(()) => Ended::Closed,
    }
}

async fn converse(shared: &Shared, channel: Channel, greeted: &mut bool) -> Result<(), Ended> {
    let (welcome, welcomed) = oneshot::channel();
    let mut client = WorkerControlClient::new(channel);
    let greeting = async {
        let mut incoming = client.attach(outgoing(shared.clone(), welcomed)).await?.into_inner();
        Ok::<_, Ended>((first(&mut incoming).await?, incoming))
    };
    let (hello, mut incoming) =
        tokio::time::timeout(HELLO_TIMEOUT, greeting).await.map_err(|_| Ended::NoHello)??;
    accept(shared, &hello)?;
    *greeted = true;
    // The outgoing half is gone only when the call has ended, which the loop below meets.
    let _ended_already = welcome.send(());
    while let Some(message) = incoming.message().await? {
        if let Some(controller_message::Message::DesiredState(state)) = message.message {
            let (term, index) = (state.term, state.index);
            match desired::obey(&shared.desired, state) {
                Ok(changed) => tracing::debug!(term, index, changed, "desired state"),
                Err(error) => tracing::error!(
                    term,
                    index,
                    error = error.message,
                    "desired state not obeyed: it cannot be read"
                ),
            }
        }
    }
    Ok(())
}

async fn first(incoming: &mut Streaming<wire::ControllerMessage>) -> Result<wire::ControllerHello, Ended> {
    match incoming.message().await?.ok_or(Ended::Closed)?.message {
        Some(controller_message::Message::Hello(hello)) => Ok(hello),
        _ => Err(Ended::NotHello),
    }
}

fn accept(shared: &Shared, hello: &wire::ControllerHello) -> Result<(), Ended> {
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(Ended::Protocol { theirs: hello.protocol_version, build: hello.build.clone() });
    }
    shared.data_dir.adopt_cluster(&ClusterId(hello.cluster_id.as_str().into()))?;
    let epoch = Some(Epoch(hello.epoch));
    shared.epoch.send_if_modified(|known| {
        let newer = *known < epoch;
        if newer {
            *known = epoch;
        }
        newer
    });
    Ok(())
}

enum Next {
    Hello(oneshot::Receiver<()>),
    Updates,
}

/// The greeting, then, once the controller greeted back, every change of the functions' statuses
/// and every telemetry: the latest of each, as fast as the controller reads.
fn outgoing(shared: Shared, welcomed: oneshot::Receiver<()>) -> impl Stream<Item = wire::WorkerMessage> {
    stream::unfold((shared, Next::Hello(welcomed), true), |(mut shared, next, fresh)| async move {
        match next {
            Next::Hello(welcomed) if fresh => {
                let hello = worker_message::Message::Hello(greeting(&shared));
                Some((message(hello), (shared, Next::Hello(welcomed), false)))
            }
            Next::Hello(welcomed) => {
                welcomed.await.ok()?;
                let statuses = statuses(&mut shared);
                shared.telemetry.mark_changed();
                Some((message(statuses), (shared, Next::Updates, false)))
            }
            Next::Updates => {
                let update = tokio::select! {
                    biased;
                    changed = shared.statuses.changed() => changed.ok().map(|()| statuses(&mut shared)),
                    changed = shared.telemetry.changed() => changed.ok().map(|()| telemetry(&mut shared)),
                };
                Some((message(update?), (shared, Next::Updates, false)))
            }
        }
    })
}

fn greeting(shared: &Shared) -> wire::WorkerHello {
    let cluster_id = shared.data_dir.cluster().map(|id| id.to_string()).unwrap_or_default();
    wire::WorkerHello {
        cluster_id,
        protocol_version: PROTOCOL_VERSION,
        build: BUILD.into(),
        ..shared.hello.clone()
    }
}

fn statuses(shared: &mut Shared) -> worker_message::Message {
    let functions = shared.statuses.borrow_and_update().as_ref().clone();
    worker_message::Message::FunctionStatuses(wire::FunctionStatuses { functions })
}

fn telemetry(shared: &mut Shared) -> worker_message::Message {
    let epoch = shared.epoch.borrow().unwrap_or_default().0;
    let telemetry = shared.telemetry.borrow_and_update().as_ref().clone();
    worker_message::Message::Telemetry(wire::Telemetry { epoch, ..telemetry })
}

fn message(message: worker_message::Message) -> wire::WorkerMessage {
    wire::WorkerMessage { message: Some(message) }
}
