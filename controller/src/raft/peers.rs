//! Connections to the other controllers, shared by everything that calls them. openraft asks for a
//! client with every vote and every linearizable read: those must not each connect anew.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use millrace_proto::raft::Message;
use millrace_proto::raft::raft_client::RaftClient;
use millrace_proto::status::from_status;
use millrace_proto::trace;
use millrace_raft_store::{ENTRY_BYTES_MAX, Identity, Member};
use millrace_transport::channel::{ChannelConfig, endpoint};
use millrace_types::{Digest, Failure, Reason};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::codec::{self, Target};
use super::runtime::RaftSpawner;
use super::silence::Silences;
use super::unheard::Voice;
use super::world::World;
use crate::artifacts::Held;
use crate::config::KEEP_ALIVE;

/// The largest message. One read of the log gives a few MiB at most, or else a single entry.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 << 20;
const _: () = assert!(2 * ENTRY_BYTES_MAX < MESSAGE_BYTES_MAX, "an entry and its envelope fit a message");
/// Connections kept. Members are few; what is beyond them are addresses that were left.
const CONNECTIONS_MAX: usize = 64;

/// What a connection carries. What must not wait never shares one with what is long: a full window
/// would hold a heartbeat up behind a model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// openraft's log and votes.
    Log,
    /// Writes and reads on their way to the leader, and changes of the group.
    Requests,
    /// Snapshots and model files.
    Bulk,
}

/// The other controllers of one cluster, as far as calling them goes. Cloning shares the connections.
#[derive(Debug, Clone)]
pub(crate) struct Peers {
    own: Arc<Identity>,
    world: Arc<dyn World>,
    /// A lock: held to look one up or make one, never while one is used.
    channels: Arc<Mutex<BTreeMap<(String, Lane), Channel>>>,
    /// Where their connections are.
    pub(super) spawner: RaftSpawner,
    /// Whether this controller speaks as a leader.
    pub(super) voice: Voice,
    /// Whom its log does not reach.
    pub(super) silences: Silences,
}

/// One member, as far as calling it goes.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(super) own: Arc<Identity>,
    pub(super) to: Target,
    pub(super) address: String,
    /// `Err` when its address is none: every call says so.
    pub(super) client: Result<RaftClient<Channel>, String>,
}

impl Peers {
    pub(crate) fn new(own: Identity, world: Arc<dyn World>, spawner: RaftSpawner) -> Self {
        Self {
            own: Arc::new(own),
            world,
            channels: Arc::default(),
            spawner,
            voice: Voice::default(),
            silences: Silences::default(),
        }
    }

    /// Whose calls these are.
    pub(crate) fn own(&self) -> &Arc<Identity> {
        &self.own
    }

    /// A member.
    pub(crate) fn peer(&self, id: u64, member: &Member, lane: Lane) -> Peer {
        let client = self.channel(&member.address, lane).map(limited);
        Peer {
            own: self.own.clone(),
            to: Target { id, directory: member.directory.clone() },
            address: member.address.clone(),
            client: client.map_err(|error| error.to_string()),
        }
    }

    /// How an address is reached.
    pub(super) fn world(&self) -> &dyn World {
        &*self.world
    }

    /// The connection to an address, made at its first use.
    pub(crate) fn channel(&self, address: &str, lane: Lane) -> Result<Channel, tonic::transport::Error> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (address.to_owned(), lane);
        if let Some(channel) = channels.get(&key) {
            return Ok(channel.clone());
        }
        let channel = {
            // Whoever asks first: the others use it too.
            let _entered = self.spawner.enter();
            connect(&*self.world, address)?
        };
        if channels.len() >= CONNECTIONS_MAX {
            channels.clear();
        }
        channels.insert(key, channel.clone());
        Ok(channel)
    }
}

/// A client with the limits both sides use.
pub(super) fn limited(channel: Channel) -> RaftClient<Channel> {
    RaftClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

pub(super) fn connect(world: &dyn World, address: &str) -> Result<Channel, tonic::transport::Error> {
    Ok(world.dial(&endpoint(address, ChannelConfig::watched(KEEP_ALIVE))?))
}

impl Peer {
    /// Which member it is.
    pub(crate) fn id(&self) -> u64 {
        self.to.id
    }

    /// Where it is called.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Sends one message and reads the answer.
    ///
    /// # Errors
    /// The peer's own failure; or `NO_LEADER` when none came, with `may_have_executed` unless the
    /// message was never sent.
    pub(crate) async fn call<T: Serialize, R: DeserializeOwned>(
        &self,
        timeout: Duration,
        value: &T,
        send: impl AsyncFnOnce(RaftClient<Channel>, Request<Message>) -> Result<Response<Message>, Status>,
    ) -> Result<R, Failure> {
        let mut request = Request::new(codec::encode(&self.own, &self.to, value)?);
        trace::inject(request.metadata_mut());
        let client = self.client.clone().map_err(|reason| self.lost(&reason))?;
        let answer = tokio::time::timeout(timeout, send(client, request)).await;
        let answer = answer
            .map_err(|_| self.lost(&format!("no answer within {timeout:?}")).after_execution())?
            .map_err(|status| self.failure(&status))?;
        codec::decode(&self.own, answer.get_ref()).map_err(Failure::after_execution)
    }

    /// Gives a model file to the member to hold. Answered when it is checked and durable there.
    ///
    /// # Errors
    /// The peer's own failure, or `NO_LEADER` when it did not answer.
    pub(crate) async fn hold_artifact(
        &self,
        timeout: Duration,
        held: &Held,
        chunks: impl Stream<Item = Vec<u8>> + Send + 'static,
    ) -> Result<(), Failure> {
        let (own, to) = (self.own.clone(), self.to.clone());
        let chunks = chunks.map(move |chunk| codec::message(&own, &to, chunk));
        self.call(timeout, held, async |mut client, header| {
            client.hold_artifact(stream::once(async { header.into_inner() }).chain(chunks)).await
        })
        .await
    }

    /// Takes a model file from the member, as it has it: whoever receives it checks it.
    ///
    /// # Errors
    /// `ARTIFACT_NOT_FOUND` when the member has not got it, or `NO_LEADER` when it did not answer.
    pub(crate) async fn give_artifact(
        &self,
        timeout: Duration,
        digest: &Digest,
    ) -> Result<impl Stream<Item = Result<Bytes, Failure>> + Send + use<>, Failure> {
        let request = codec::encode(&self.own, &self.to, digest)?;
        let mut client = self.client.clone().map_err(|reason| self.lost(&reason))?;
        let answer = tokio::time::timeout(timeout, client.give_artifact(request)).await;
        let answer = answer.map_err(|_| self.lost(&format!("no answer within {timeout:?}")))?;
        let chunks = answer.map_err(|status| self.failure(&status))?.into_inner();
        let peer = self.clone();
        Ok(chunks.map(move |message| {
            let message = message.map_err(|status| peer.failure(&status))?;
            codec::check(&peer.own, &message)?;
            Ok(message.payload)
        }))
    }

    fn lost(&self, reason: &str) -> Failure {
        let message = format!("controller {} at {} did not answer: {reason}", self.to.id, self.address);
        Failure::new(Reason::NoLeader, message)
    }

    /// What the peer said, or why it said nothing.
    pub(super) fn failure(&self, status: &Status) -> Failure {
        if status.source().is_none() {
            return from_status(status);
        }
        let lost = self.lost(status.message());
        if never_sent(status) { lost } else { lost.after_execution() }
    }
}

/// Whether a call ended before its connection stood.
fn never_sent(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}
