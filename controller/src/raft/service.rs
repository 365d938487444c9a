//! Answers the calls of the Raft group's other members.

use std::sync::Arc;
use std::time::Duration;

use futures::TryFutureExt as _;
use millrace_proto::raft::{JoinRequest, JoinResponse, Message};
use millrace_proto::trace;
use millrace_raft_store::{SnapshotFile, SnapshotMeta, Vote};
use millrace_transport::MinimumRate;
use millrace_types::{Failure, Reason};
use openraft::Snapshot;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument as _;

use super::codec::{self, MessageReceiver};
use super::replica::Replica;
use super::route::ForwardedWrite;
use crate::pace::TransferPace;

/// Answers the other members of the group as one member of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct GroupService {
    replica: Replica,
    appends: Arc<Semaphore>,
    snapshots: Arc<Semaphore>,
}

/// The largest received snapshot, in bytes.
const SNAPSHOT_BYTES_MAX: u64 = 4 << 30;
/// The minimum rate of a snapshot. The sender only reads a file.
const SNAPSHOT_RATE: MinimumRate = MinimumRate { grace: Duration::from_secs(30), bytes_per_sec: 1 << 20 };
/// Snapshots received at a time: the leader sends a snapshot, and a new leader may send another.
const SNAPSHOTS_MAX: usize = 2;

/// A response to another controller.
pub(crate) type Answer = Result<Response<Message>, Status>;

/// AppendEntries calls in progress in openraft. The leader soon gives up on a call and resends the
/// entries, so calls must not accumulate in memory while this disk hangs.
const APPENDS_MAX: usize = 16;

impl GroupService {
    /// Returns a service for the member with this replica.
    pub(crate) fn new(replica: Replica) -> Self {
        let appends = Arc::new(Semaphore::new(APPENDS_MAX));
        let snapshots = Arc::new(Semaphore::new(SNAPSHOTS_MAX));
        Self { replica, appends, snapshots }
    }

    /// Decodes a message for this controller. A sender whose number the group knows must have the known
    /// data directory. An unknown number is accepted, because a later group may have such a member.
    pub(crate) fn decode<T: DeserializeOwned>(&self, message: &Message) -> Result<T, Status> {
        let membership = self.replica.membership();
        let known = membership.get_node(&message.from);
        if known.is_some_and(|known| known.directory != message.from_directory) {
            let text = format!(
                "controller {} called from a data directory that the group does not know: the controller was replaced, or lost its directory",
                message.from
            );
            return Err(codec::status(Failure::new(Reason::PeerMismatch, text)));
        }
        codec::decode(self.replica.own(), message).map_err(codec::status)
    }

    /// Encodes a response to the sender of a request.
    pub(crate) fn answer<T: Serialize>(&self, request: &Message, value: &T) -> Answer {
        let to = MessageReceiver::sender(request);
        codec::encode(self.replica.own(), &to, value).map(Response::new).map_err(codec::status)
    }

    /// Receives a complete and verified snapshot, because openraft halts on a snapshot that does not
    /// install.
    async fn receive(
        &self,
        header: &Message,
        mut messages: Streaming<Message>,
    ) -> Result<(Vote, Snapshot<millrace_raft_store::ClusterConfig>), Status> {
        let (vote, meta): (Vote, SnapshotMeta) = self.decode(header)?;
        let Ok(_permit) = self.snapshots.try_acquire() else {
            let message = format!("{SNAPSHOTS_MAX} snapshots are being received already: try again soon");
            return Err(codec::status(Failure::new(Reason::QueueFull, message)));
        };
        let mut pace = TransferPace::begin(SNAPSHOT_RATE);
        let mut received = 0;
        let receiver = self.replica.snapshots.clone();
        // Create the file here: openraft would halt if no file can be created.
        let mut file = blocking(move || receiver.begin().map(Box::new)).await?;
        while let Some(message) = pace.next(messages.message()).await.map_err(codec::status)?? {
            codec::check(self.replica.own(), &message).map_err(codec::status)?;
            pace.count(message.payload.len());
            received += message.payload.len() as u64;
            if received > SNAPSHOT_BYTES_MAX {
                let message = format!("the snapshot has more than {SNAPSHOT_BYTES_MAX} bytes");
                return Err(codec::status(Failure::malformed(message)));
            }
            let receiver = self.replica.snapshots.clone();
            file = blocking(move || {
                receiver.check_space().map_err(|error| error.to_string())?;
                file.append(&message.payload).map_err(|error| error.to_string())?;
                Ok::<_, String>(file)
            })
            .await?;
        }
        let file = blocking(move || file.verify().map(|()| file)).await?;
        Ok((vote, Snapshot { meta, snapshot: file }))
    }
}

/// Returns the first message of a stream.
pub(crate) async fn header(messages: &mut Streaming<Message>) -> Result<Message, Status> {
    let missing = || codec::status(Failure::malformed("the stream has no header message"));
    messages.message().await?.ok_or_else(missing)
}

async fn blocking<E, F>(work: F) -> Result<Box<SnapshotFile>, Status>
where
    E: std::fmt::Display + Send + 'static,
    F: FnOnce() -> Result<Box<SnapshotFile>, E> + Send + 'static,
{
    let done = tokio::task::spawn_blocking(work).map_err(|error| internal(error.to_string()));
    done.await?.map_err(|error| internal(error.to_string()))
}

fn internal(message: String) -> Status {
    codec::status(Failure::new(Reason::Internal, message))
}

impl GroupService {
    pub(crate) async fn append_entries(&self, request: Request<Message>) -> Answer {
        let Ok(permit) = self.appends.clone().try_acquire_owned() else {
            return Err(Status::unavailable("this controller's log disk has not caught up yet"));
        };
        let rpc = self.decode(request.get_ref())?;
        let raft = self.replica.raft.clone();
        // Run in a separate task: the permit stays taken until openraft is done, even if the caller
        // goes away.
        let appended = tokio::spawn(async move {
            let answer = raft.append_entries(rpc).await;
            drop(permit);
            answer
        });
        let answer = appended.await.map_err(|error| internal(error.to_string()))?;
        self.answer(request.get_ref(), &answer)
    }

    pub(crate) async fn vote(&self, request: Request<Message>) -> Answer {
        let rpc = self.decode(request.get_ref())?;
        self.answer(request.get_ref(), &self.replica.raft.vote(rpc).await)
    }

    pub(crate) async fn pre_vote(&self, request: Request<Message>) -> Answer {
        let question = self.decode(request.get_ref())?;
        let would = self.replica.would_vote_here(question).await.map_err(codec::status)?;
        self.answer(request.get_ref(), &would)
    }

    pub(crate) async fn snapshot(&self, request: Request<Streaming<Message>>) -> Answer {
        let mut messages = request.into_inner();
        let header = header(&mut messages).await?;
        let (vote, snapshot) = self.receive(&header, messages).await?;
        self.answer(&header, &self.replica.raft.install_full_snapshot(vote, snapshot).await)
    }

    pub(crate) async fn propose(&self, request: Request<Message>) -> Answer {
        let write = self.decode::<ForwardedWrite>(request.get_ref())?.checked().map_err(codec::status)?;
        // A write without a trace header starts no trace, as at the proposing controller.
        let span = match request.metadata().contains_key("traceparent") {
            true => tracing::info_span!("raft.lead", otel.kind = "server"),
            false => tracing::Span::none(),
        };
        trace::adopt(&span, trace::extract(request.metadata()));
        // Run in a separate task: if the caller goes away, the write continues and the answer is
        // counted.
        let replica = self.replica.clone();
        let written = tokio::spawn(async move { replica.propose_here(&write).await }.instrument(span));
        let written = written.await.map_err(|error| internal(error.to_string()))?;
        self.answer(request.get_ref(), &written.map_err(codec::status)?)
    }

    pub(crate) async fn read_index(&self, request: Request<Message>) -> Answer {
        let () = self.decode(request.get_ref())?;
        let index = self.replica.read_index_here().await.map_err(codec::status)?;
        self.answer(request.get_ref(), &index)
    }

    pub(crate) async fn change_group(&self, request: Request<Message>) -> Answer {
        let (change, caller) = self.decode(request.get_ref())?;
        // Run in a separate task: if the caller goes away, the operation still records the outcome.
        let replica = self.replica.clone();
        let changed = tokio::spawn(async move { replica.change_here(change, caller).await });
        let members = changed.await.map_err(|error| internal(error.to_string()))?;
        self.answer(request.get_ref(), &members.map_err(codec::status)?)
    }

    pub(crate) async fn transfer(&self, request: Request<Message>) -> Answer {
        let successor = self.decode(request.get_ref())?;
        let led = self.replica.transfer_here(successor).await.map_err(codec::status)?;
        self.answer(request.get_ref(), &led)
    }

    pub(crate) async fn take_over(&self, request: Request<Message>) -> Answer {
        let () = self.decode(request.get_ref())?;
        let led = self.replica.take_over_here().await.map_err(codec::status)?;
        self.answer(request.get_ref(), &led)
    }

    pub(crate) async fn get_status(&self, request: Request<Message>) -> Answer {
        let () = self.decode(request.get_ref())?;
        let status = self.replica.sound_status().map_err(codec::status)?;
        self.answer(request.get_ref(), &status)
    }

    pub(crate) async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        self.replica.join(request.into_inner()).await.map(Response::new).map_err(codec::status)
    }
}
