//! A controller's configuration and named bounds.

mod inspection;
mod object_store_url;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_nodes::lease;
use millrace_proto::trace::SpanRing;
use millrace_transport::{MinimumRate, PortLimits, ServerConfig};
use millrace_types::Bytes;
use millrace_types::policy::PresetName;

use crate::clock::{SystemClock, WallClock};

pub use self::inspection::{Inspection, InspectorCommand};
pub(crate) use self::object_store_url::ObjectStoreKind;
pub use self::object_store_url::{ObjectStoreUrl, SharedPlaceError};

/// The default port for clients: inference, admin API, health and metrics.
pub const CLIENT_PORT: u16 = 8080;
/// The default port for workers and other controllers.
pub const INTERNAL_PORT: u16 = 7070;

/// The default number of log entries between two snapshots.
pub const SNAPSHOT_EVERY: u64 = 10_000;

/// The largest message between a controller and a worker, in bytes: a request's or a response's
/// tensors.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// The interval between probes of an idle connection, and the longest wait for a probe's answer. A peer
/// that vanished silently is noticed within twice this time.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Calls and streams served at a time per connection of a worker or controller.
const INTERNAL_STREAMS_MAX: u32 = 4_096;
/// Unread bytes in flight per internal call, and per internal connection. These calls carry pieces of
/// snapshots and model files, and the append entries for a follower that is behind.
const INTERNAL_WINDOWS: (u32, u32) = (2 << 20, 8 << 20);

/// Returns the configuration of the internal port's server.
pub(crate) fn internal_server(port: PortLimits) -> ServerConfig {
    ServerConfig {
        port,
        streams_max: INTERNAL_STREAMS_MAX,
        stream_window: INTERNAL_WINDOWS.0,
        connection_window: INTERNAL_WINDOWS.1,
        keep_alive_every: KEEP_ALIVE,
        keep_alive_max: KEEP_ALIVE,
        ..ServerConfig::default()
    }
}

/// The source of a controller's membership in a cluster. Only an empty data directory uses this
/// value: a used directory has an identity file, and a controller that is already a member of a group
/// continues as that member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterStart {
    /// Begins a cluster of this controller alone.
    Bootstrap,
    /// Begins a cluster if each of these controllers reports an empty data directory too, and joins the
    /// existing cluster otherwise. This is for several controllers that start together, unattended. The
    /// controller waits for all answers: a controller that lost its directory must never begin a second
    /// cluster beside the first.
    Found {
        /// Internal addresses (`host:port`) of all the other controllers.
        with: Vec<String>,
    },
    /// Joins the cluster of other controllers.
    Join {
        /// Internal addresses (`host:port`) of controllers of that cluster. A single answer is enough.
        at: Vec<String>,
        /// The role that the controller takes.
        role: JoinAs,
    },
    /// Refuses an empty data directory: for a service that must never begin a second cluster.
    Reopen,
}

/// The role of a controller that joins a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinAs {
    /// The controller becomes a voter as soon as its log is complete.
    Voter,
    /// The controller becomes a learner: a learner receives the log and serves clients, and does not
    /// vote until an operator promotes the learner.
    Learner,
}

/// The configuration of a controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// The controller's number in the group, never reused. Only an empty data directory accepts the
    /// number: a directory that belongs to another number is refused.
    pub id: ControllerId,
    /// The source of the controller's membership in a cluster.
    pub start: ClusterStart,
    /// The directory of all files of this controller, locked while the controller runs.
    pub data_dir: PathBuf,
    /// The address at which clients connect. Port 0 picks a free port.
    pub client_listen: SocketAddr,
    /// The address at which workers and other controllers connect. Port 0 picks a free port.
    pub internal_listen: SocketAddr,
    /// The address at which other controllers reach [`internal_listen`](Self::internal_listen), as
    /// `host:port`. `None` means the bound address. The group's membership stores this address.
    pub internal_advertise: Option<String>,
    /// The address at which clients reach [`client_listen`](Self::client_listen), as `host:port`.
    /// `None` means the bound address. The cluster's status shows this address.
    pub client_advertise: Option<String>,
    /// Log entries between two snapshots. Each snapshot lets the log drop the earlier entries. A
    /// smaller number saves disk space and shortens the start, but writes the whole state more often.
    pub snapshot_every: u64,
    /// The object store for model files, which all controllers of the group share. `None` means that
    /// each controller stores the files on the local disk. All controllers need the same value: the
    /// cluster's status warns about a difference.
    pub artifacts: Option<ObjectStoreUrl>,
    /// The preset to schedule by until an operator sets a policy. `None` means the default preset.
    pub preset: Option<PresetName>,
    /// Whether the admin API accepts fault injection, for tests and demonstrations.
    pub allow_faults: bool,
    /// Whether the internal port serves the fault service, for tests. Any client of that port may then
    /// move this controller's clock and stall the disk.
    pub fault_injection: bool,
    /// Whether the controller serves every client that can connect, without encryption or
    /// authentication. If false, the controller listens on loopback addresses only.
    pub insecure: bool,
    /// Host names that requests may carry, beside `localhost` and the hosts of
    /// [`client_listen`](Self::client_listen) and [`client_advertise`](Self::client_advertise).
    /// Requests with another host name are refused, because a web page could have resolved a foreign
    /// name to this address (DNS rebinding).
    pub host_names: Vec<String>,
    /// Bounds on the requests of clients.
    pub limits: ControllerLimits,
    /// The process that checks uploaded models.
    pub inspection: Inspection,
    /// The seed of random choices. The command line draws the seed from the system; tests fix it.
    pub seed: u64,
    /// The clock that stamps commands.
    pub clock: Arc<dyn WallClock>,
    /// The store of this process's spans; `None` if the process keeps no spans.
    pub kept: Option<SpanRing>,
    /// The runtime that runs Raft, so that requests cannot delay Raft (see [`RaftRuntime`]). `None`
    /// means the runtime in which the controller starts.
    ///
    /// [`RaftRuntime`]: crate::RaftRuntime
    pub raft_runtime: Option<tokio::runtime::Handle>,
}

impl ControllerConfig {
    /// Returns the defaults on loopback: the first controller of a new cluster. Models are checked in
    /// this process; a server sets [`Self::inspection`] to a child process instead.
    #[must_use]
    pub fn new(data_dir: PathBuf, seed: u64) -> Self {
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self {
            id: ControllerId(1),
            start: ClusterStart::Bootstrap,
            data_dir,
            client_listen: loopback(CLIENT_PORT),
            internal_listen: loopback(INTERNAL_PORT),
            internal_advertise: None,
            client_advertise: None,
            snapshot_every: SNAPSHOT_EVERY,
            artifacts: None,
            preset: None,
            allow_faults: false,
            fault_injection: false,
            insecure: false,
            host_names: Vec::new(),
            limits: ControllerLimits::default(),
            inspection: Inspection::InProcess,
            seed,
            clock: Arc::new(SystemClock),
            kept: None,
            raft_runtime: None,
        }
    }
}

/// The minimum rate of an upload.
pub(crate) const UPLOAD_RATE: MinimumRate =
    MinimumRate { grace: Duration::from_secs(30), bytes_per_sec: 64 << 10 };
/// Memory of all processes together that check uploaded models.
pub(crate) const INSPECTION_MEMORY: Bytes = Bytes::gib(8);

/// Bounds on the requests of clients.
#[derive(Debug, Clone)]
pub struct ControllerLimits {
    /// The size of the largest accepted model file.
    pub artifact_bytes: Bytes,
    /// Concurrent uploads.
    pub uploads: usize,
    /// The time that a model file stays after the last use by a function.
    pub artifact_grace: Duration,
    /// Bytes of the local cache of model files that are in the object store. The cache is trimmed every
    /// [`collect_every`](Self::collect_every).
    pub artifact_cache: Bytes,
    /// The interval between searches for unused model files.
    pub collect_every: Duration,
    /// The lease: the time that a silent worker counts as alive.
    pub lease: lease::LeaseLimits,
    /// Connection limits of the client port.
    pub client: PortLimits,
    /// Connection limits of the internal port.
    pub internal: PortLimits,
}

impl Default for ControllerLimits {
    fn default() -> Self {
        Self {
            artifact_bytes: Bytes::gib(16),
            uploads: 32,
            artifact_grace: Duration::from_secs(3600),
            artifact_cache: Bytes::gib(64),
            collect_every: Duration::from_secs(60),
            lease: lease::LeaseLimits::default(),
            client: PortLimits::new(4_096),
            internal: PortLimits::new(1_024),
        }
    }
}
