//! Connections to the other controllers, shared by all callers. openraft asks for a client with every
//! vote and every linearizable read, and each client must not open a connection of its own.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use millrace_proto::raft::Message;
use millrace_proto::raft::raft_client::RaftClient;
use millrace_proto::status::from_status;
use millrace_proto::trace;
use millrace_raft_store::{DirectoryOwner, ENTRY_BYTES_MAX, GroupMember};
use millrace_transport::channel::{ChannelConfig, endpoint};
use millrace_types::{Failure, Reason};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::codec::{self, MessageReceiver};
use super::leader_gate::LeaderGate;
use super::outages::ReplicationOutages;
use super::runtime::RaftSpawner;
use super::world::RaftEnvironment;
use crate::config::KEEP_ALIVE;

/// The largest message, in bytes. One read of the log returns a few MiB at most, or a single entry.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
const _: () = assert!(2 * ENTRY_BYTES_MAX < MESSAGE_BYTES_MAX, "an entry and its envelope fit a message");
/// Cached connections. A group has few members: further connections lead to former addresses.
const CONNECTIONS_MAX: usize = 64;

/// The kind of traffic that a connection carries. Urgent and bulk traffic never share a connection: a
/// full flow-control window would delay a heartbeat behind a model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TrafficClass {
    /// Log entries and votes of openraft.
    Log,
    /// Writes and reads forwarded to the leader, and membership changes.
    Requests,
    /// Snapshots and model files.
    Bulk,
}

/// The connections to the other controllers of one cluster. Clones share the connections.
#[derive(Debug, Clone)]
pub(crate) struct RaftPeerConnections {
    own: Arc<DirectoryOwner>,
    world: Arc<dyn RaftEnvironment>,
    /// Connections by address and lane. The lock is held only to look up or to insert a connection,
    /// never while a connection is used.
    channels: Arc<Mutex<BTreeMap<(String, TrafficClass), Channel>>>,
    /// Spawns connection tasks in Raft's runtime.
    pub(super) spawner: RaftSpawner,
    /// Whether this controller acts as a leader.
    pub(super) voice: LeaderGate,
    /// The members that the log does not reach.
    pub(super) silences: ReplicationOutages,
}

/// A client of one member.
#[derive(Debug, Clone)]
pub(crate) struct PeerClient {
    pub(super) own: Arc<DirectoryOwner>,
    pub(super) to: MessageReceiver,
    pub(super) address: String,
    /// The client; `Err` with the reason if the member's address is invalid, so that every call fails.
    pub(super) client: Result<RaftClient<Channel>, String>,
}

impl RaftPeerConnections {
    pub(crate) fn new(own: DirectoryOwner, world: Arc<dyn RaftEnvironment>, spawner: RaftSpawner) -> Self {
        Self {
            own: Arc::new(own),
            world,
            channels: Arc::default(),
            spawner,
            voice: LeaderGate::default(),
            silences: ReplicationOutages::default(),
        }
    }

    /// Returns the identity of the calling controller.
    pub(crate) fn own(&self) -> &Arc<DirectoryOwner> {
        &self.own
    }

    /// Returns a client of a member.
    pub(crate) fn peer(&self, id: u64, member: &GroupMember, lane: TrafficClass) -> PeerClient {
        let client = self.channel(&member.address, lane).map(limited);
        PeerClient {
            own: self.own.clone(),
            to: MessageReceiver { id, directory: member.directory.clone() },
            address: member.address.clone(),
            client: client.map_err(|error| error.to_string()),
        }
    }

    /// Returns the network that dials addresses.
    pub(super) fn world(&self) -> &dyn RaftEnvironment {
        &*self.world
    }

    /// Returns the cached connection to an address, which connects at the first use.
    pub(crate) fn channel(
        &self,
        address: &str,
        lane: TrafficClass,
    ) -> Result<Channel, tonic::transport::Error> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (address.to_owned(), lane);
        if let Some(channel) = channels.get(&key) {
            return Ok(channel.clone());
        }
        let channel = {
            // Create the connection in Raft's runtime, because callers of other runtimes share the
            // connection.
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

/// Returns a client with the message limits of both sides.
pub(super) fn limited(channel: Channel) -> RaftClient<Channel> {
    RaftClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

pub(super) fn connect(
    world: &dyn RaftEnvironment,
    address: &str,
) -> Result<Channel, tonic::transport::Error> {
    Ok(world.dial(&endpoint(address, ChannelConfig::watched(KEEP_ALIVE))?))
}

impl PeerClient {
    /// Returns the member's number.
    pub(crate) fn id(&self) -> u64 {
        self.to.id
    }

    /// Returns the member's internal address.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Sends one message and returns the response.
    ///
    /// # Errors
    /// The peer's own failure; or `NO_LEADER` if no response arrived, with `may_have_executed` unless
    /// the message was never sent.
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

    /// Returns the payloads as messages to the member.
    pub(crate) fn messages(
        &self,
        payloads: impl Stream<Item = Vec<u8>> + Send + 'static,
    ) -> impl Stream<Item = Message> + Send + 'static {
        let own = self.own.clone();
        let to = self.to.clone();
        payloads.map(move |payload| codec::message(&own, &to, payload))
    }

    /// Sends one message and returns the payloads of the response's messages, each after a check of the
    /// sender.
    ///
    /// # Errors
    /// The peer's own failure, or `NO_LEADER` if no answer arrived.
    pub(crate) async fn stream<T, F>(
        &self,
        timeout: Duration,
        value: &T,
        send: F,
    ) -> Result<impl Stream<Item = Result<Bytes, Failure>> + Send + use<T, F>, Failure>
    where
        T: Serialize,
        F: AsyncFnOnce(RaftClient<Channel>, Message) -> Result<Response<Streaming<Message>>, Status>,
    {
        let request = codec::encode(&self.own, &self.to, value)?;
        let client = self.client.clone().map_err(|reason| self.lost(&reason))?;
        let answer = tokio::time::timeout(timeout, send(client, request)).await;
        let answer = answer.map_err(|_| self.lost(&format!("no answer within {timeout:?}")))?;
        let messages = answer.map_err(|status| self.failure(&status))?.into_inner();
        let peer = self.clone();
        Ok(messages.map(move |message| {
            let message = message.map_err(|status| peer.failure(&status))?;
            codec::check(&peer.own, &message)?;
            Ok(message.payload)
        }))
    }

    fn lost(&self, reason: &str) -> Failure {
        let message = format!("controller {} at {} did not answer: {reason}", self.to.id, self.address);
        Failure::new(Reason::NoLeader, message)
    }

    /// Returns the peer's failure, or the reason why the peer did not answer.
    pub(super) fn failure(&self, status: &Status) -> Failure {
        if status.source().is_none() {
            return from_status(status);
        }
        let lost = self.lost(status.message());
        if never_sent(status) { lost } else { lost.after_execution() }
    }
}

/// Whether a call ended before the connection was established.
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
