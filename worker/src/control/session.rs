//! A stream to one controller. The session greets, sends this worker's messages
//! ([`super::outgoing`]) and obeys the controller's. Lost streams are reopened while the worker
//! lives.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_core::backoff::BackoffDelays;
use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::parts::{DesiredHead, ItemSet, PartAssembler, PartError, control_client, cut_text};
use millrace_proto::worker as wire;
use millrace_proto::worker::controller_message::Message;
use millrace_types::{ClusterId, Epoch, Reason};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Streaming;
use tonic::transport::Channel;

use super::desired;
use super::leaders::{LeaderClaims, StreamId};
use super::outgoing::{StreamSources, outgoing};
use crate::clock::Clock;
use crate::data_dir;
use crate::desired_state::DesiredState;

/// Time that a controller has to greet back.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Shortest wait before a stream is reopened.
const RECONNECT_BASE: Duration = Duration::from_millis(50);
/// Longest wait before a stream is reopened.
const RECONNECT_CEILING: Duration = Duration::from_secs(2);

/// Age at which a lost stream no longer counts as another failure in a row. Longer than
/// [`HELLO_TIMEOUT`], so that a controller that greets and hangs up is not called in a tight loop.
const STABLE: Duration = Duration::from_secs(10);

/// The state that all sessions of a worker share.
#[derive(Clone)]
pub(super) struct SessionContext {
    pub(super) feeds: StreamSources,
    pub(super) desired: watch::Sender<DesiredState>,
    pub(super) leaders: watch::Sender<LeaderClaims>,
    pub(super) answers: mpsc::Sender<wire::CheckpointAck>,
    /// Positions of the controllers that have greeted back and are still connected.
    pub(super) attached: watch::Sender<BTreeSet<usize>>,
    pub(super) streams: Arc<AtomicU64>,
    pub(super) clock: Arc<dyn Clock>,
}

/// A controller.
#[derive(Debug)]
pub(super) struct ControllerEndpoint {
    /// Position in the list of controllers.
    pub(super) place: usize,
    pub(super) address: String,
    pub(super) channel: Channel,
}

/// A refusal after which this worker cannot continue: no controller has registered the worker, and
/// this controller does not accept the worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("controller {controller} refused this worker: {message}")]
pub struct WorkerRefusal {
    pub controller: String,
    /// The reason, and the next step.
    pub message: String,
}

/// The reason why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error("{}", said(.0))]
    Status(#[from] tonic::Status),
    #[error("the controller closed the stream")]
    Closed,
    #[error("the controller did not greet within {HELLO_TIMEOUT:?}")]
    NoHello,
    #[error("the controller's first message was not a greeting")]
    NotHello,
    #[error(
        "the controller speaks protocol {theirs} (build {build}) and this worker {PROTOCOL_VERSION}: run the same version of both"
    )]
    Protocol { theirs: u32, build: String },
    #[error(transparent)]
    DataDir(#[from] data_dir::Error),
    #[error("the controller sent a desired state that cannot be assembled: {0}")]
    Parts(#[from] PartError),
}

/// Returns the message of a status, or the description of its code.
fn said(status: &tonic::Status) -> &str {
    if status.message().is_empty() { status.code().description() } else { status.message() }
}

/// Keeps a stream to one controller open. Returns when this worker has left in order, or with a
/// refusal after which the worker cannot continue.
pub(super) async fn run(
    shared: SessionContext,
    peer: ControllerEndpoint,
    seed: u64,
) -> Option<WorkerRefusal> {
    let mut waits = BackoffDelays::new(RECONNECT_BASE, RECONNECT_CEILING, seed);
    let mut failures = 0;
    let mut breaks = None;
    let mut leaving = shared.feeds.leaving.clone();
    while !*leaving.borrow() {
        let began = shared.clock.now();
        let StreamOutcome { greeted, ended } = attach(&shared, &peer, breaks.clone()).await;
        if let Some(refused) = fatal(&shared, &peer.address, &ended) {
            return Some(refused);
        }
        if *leaving.borrow() {
            break;
        }
        if shared.clock.now().since(began) >= STABLE {
            failures = 0;
            breaks = None;
        } else if greeted {
            breaks = Some(stream_break(breaks.as_ref(), &ended));
        }
        let wait = waits.after(failures);
        failures = failures.saturating_add(1);
        tracing::warn!(controller = peer.address, reason = %ended, ?wait, "no stream to the controller: serving continues without it");
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            // A closed channel means that the worker was dropped, together with this task.
            _ = leaving.wait_for(|leaving| *leaving) => {}
        }
    }
    None
}

/// Returns the refusal after which the worker must end, if `ended` is fatal. A worker that another
/// controller has registered does not end: the controller group is being changed then, and serving
/// continues.
fn fatal(shared: &SessionContext, address: &str, ended: &StreamEnd) -> Option<WorkerRefusal> {
    if shared.feeds.registrations.get().current.is_some() {
        return None;
    }
    let message = match ended {
        StreamEnd::DataDir(error @ data_dir::Error::OtherCluster { .. }) => error.to_string(),
        StreamEnd::Protocol { .. } => ended.to_string(),
        StreamEnd::Status(status) => {
            let failure = millrace_proto::status::from_status(status);
            if failure.reason != Reason::PeerMismatch {
                return None;
            }
            failure.message
        }
        _ => return None,
    };
    Some(WorkerRefusal { controller: address.to_owned(), message })
}

/// The outcome of a stream.
struct StreamOutcome {
    /// Whether the controller greeted back.
    greeted: bool,
    ended: StreamEnd,
}

/// Counts a stream that broke soon after its greeting. The greeting of the next stream reports the
/// count.
fn stream_break(before: Option<&wire::StreamBreak>, ended: &StreamEnd) -> wire::StreamBreak {
    let mut why = ended.to_string();
    cut_text(&mut why);
    wire::StreamBreak { times: before.map_or(0, |before| before.times).saturating_add(1), why }
}

async fn attach(
    shared: &SessionContext,
    peer: &ControllerEndpoint,
    breaks: Option<wire::StreamBreak>,
) -> StreamOutcome {
    let stream = StreamId(shared.streams.fetch_add(1, Ordering::Relaxed));
    let ended = converse(shared, peer, stream, breaks).await;
    let greeted = shared.attached.send_if_modified(|attached| attached.remove(&peer.place));
    shared.leaders.send_if_modified(|leaders| leaders.gone(stream));
    StreamOutcome { greeted, ended: ended.err().unwrap_or(StreamEnd::Closed) }
}

async fn converse(
    shared: &SessionContext,
    peer: &ControllerEndpoint,
    stream: StreamId,
    breaks: Option<wire::StreamBreak>,
) -> Result<(), StreamEnd> {
    let (welcome, welcomed) = oneshot::channel();
    let mut client = control_client(peer.channel.clone());
    let greeting = async {
        let outgoing = outgoing(shared.feeds.clone(), stream, breaks, welcomed);
        let mut incoming = client.attach(outgoing).await?.into_inner();
        Ok::<_, StreamEnd>((first(&mut incoming).await?, incoming))
    };
    let (hello, mut incoming) =
        tokio::time::timeout(HELLO_TIMEOUT, greeting).await.map_err(|_| StreamEnd::NoHello)??;
    accept(shared, &hello)?;
    shared.attached.send_if_modified(|attached| attached.insert(peer.place));
    // The receiver is gone only if the call has ended, which the loop below notices.
    let _ended_already = welcome.send(());
    let mut told = DesiredStream::default();
    while let Some(message) = incoming.message().await? {
        if let Some(message) = message.message {
            hear(shared, stream, &mut told, message)?;
        }
    }
    Ok(())
}

/// The desired state as one stream sends it. Parts of different streams must never mix.
#[derive(Default)]
struct DesiredStream {
    parts: PartAssembler<wire::DesiredState>,
    complete: ItemSet<wire::DesiredState>,
}

fn hear(
    shared: &SessionContext,
    stream: StreamId,
    told: &mut DesiredStream,
    message: Message,
) -> Result<(), PartError> {
    match message {
        // A controller greets once; a second greeting has no meaning.
        Message::Hello(_) => {}
        Message::DesiredState(part) => {
            if let Some(update) = told.parts.take(part)? {
                told.complete.apply(update)?;
                obey(shared, &told.complete);
            }
        }
        Message::Registration(wire::Registration { epoch }) => {
            let newer = shared.feeds.registrations.registered(Epoch(epoch));
            tracing::info!(epoch, newer, "registered again");
        }
        Message::Leadership(wire::Leadership { term, leads }) => {
            shared.leaders.send_if_modified(|leaders| leaders.heard(stream, term, leads));
            if !leads {
                // The controller starts with a whole state in its next term as the leader.
                *told = DesiredStream::default();
            }
        }
        Message::CheckpointAck(answer) => {
            // The channel is full only if acknowledgements arrive faster than batches are sent. A
            // dropped acknowledgement only repeats a batch.
            if shared.answers.try_send(answer).is_err() {
                tracing::warn!("dropped an acknowledgement: its checkpoint is sent again");
            }
        }
    }
    Ok(())
}

fn obey(shared: &SessionContext, state: &ItemSet<wire::DesiredState>) {
    let DesiredHead { term, index, .. } = *state.head();
    match desired::obey(&shared.desired, state) {
        Ok(changed) => tracing::debug!(term, index, changed, "desired state"),
        Err(error) => {
            tracing::error!(
                term,
                index,
                error = error.message,
                "cannot read the desired state: keeping the last one"
            )
        }
    }
}

async fn first(
    incoming: &mut Streaming<wire::ControllerMessage>,
) -> Result<wire::ControllerHello, StreamEnd> {
    match incoming.message().await?.ok_or(StreamEnd::Closed)?.message {
        Some(Message::Hello(hello)) => Ok(hello),
        _ => Err(StreamEnd::NotHello),
    }
}

fn accept(shared: &SessionContext, hello: &wire::ControllerHello) -> Result<(), StreamEnd> {
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(StreamEnd::Protocol { theirs: hello.protocol_version, build: hello.build.clone() });
    }
    shared.feeds.data_dir.adopt_cluster(&ClusterId(hello.cluster_id.as_str().into()))?;
    shared.feeds.registrations.registered(Epoch(hello.epoch));
    Ok(())
}
