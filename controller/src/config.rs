//! What a controller is started with, and its named bounds.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_policy::lease;
use millrace_proto::trace::Kept;
use millrace_transport::{MinimumRate, PortLimits, ServerConfig};
use millrace_types::Bytes;
use millrace_types::policy::PresetName;

use crate::artifacts::SharedPlace;
use crate::clock::{SystemClock, WallClock};
use crate::inspection::Inspection;

/// The port for everything a client speaks.
pub const CLIENT_PORT: u16 = 8080;
/// The port for workers and other controllers.
pub const INTERNAL_PORT: u16 = 7070;

/// Log entries between two snapshots.
pub const SNAPSHOT_EVERY: u64 = 10_000;

/// The largest message between a gateway and a worker: a request's tensors, or its answer's.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// How often a quiet connection is tried, and how long the answer may take: a peer that vanished
/// without a word is noticed in twice this.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Calls and streams of one worker or controller that are served at a time.
const INTERNAL_STREAMS_MAX: u32 = 4_096;
/// Bytes of one internal call, and of one connection, that may be on their way unread: a snapshot's
/// and a model file's pieces, and the append entries of a follower that is behind.
const INTERNAL_WINDOWS: (u32, u32) = (2 << 20, 8 << 20);

/// Bounds of the internal port.
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

/// Where a controller's place in a cluster comes from. Only an empty data directory asks: in one
/// that was used before, the identity file decides, and a group that took the controller in goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// Begins a cluster of this controller alone.
    Bootstrap,
    /// Begins a cluster if each of these controllers says that its data directory is empty too, and
    /// joins theirs otherwise: for several that start together, unattended. It waits for all of them,
    /// so that one that lost its directory never begins a second cluster beside theirs.
    Found {
        /// Internal addresses (`host:port`) of all the other controllers.
        with: Vec<String>,
    },
    /// Joins the cluster of other controllers.
    Join {
        /// Internal addresses (`host:port`) of controllers of it: one that answers is enough.
        at: Vec<String>,
        /// What to become.
        role: JoinAs,
    },
    /// Refuses an empty data directory: for a service that must never begin a second cluster.
    Reopen,
}

/// What a controller that joins becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinAs {
    /// A voter, as soon as it has the log.
    Voter,
    /// A learner: it receives the log and serves, and does not vote until it is promoted.
    Learner,
}

/// How a controller is started.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Its number in the group, never given twice. Only an empty data directory takes it; one that
    /// belongs to another number is refused.
    pub id: ControllerId,
    /// Where its place in a cluster comes from.
    pub start: Start,
    /// Where it keeps everything. Locked while it runs.
    pub data_dir: PathBuf,
    /// Where clients connect. Port 0 takes a free one.
    pub client_listen: SocketAddr,
    /// Where workers and other controllers connect. Port 0 takes a free one.
    pub internal_listen: SocketAddr,
    /// The address that other controllers reach [`internal_listen`](Self::internal_listen) at, as
    /// `host:port`. `None`: where it listens. Kept in the group's membership.
    pub internal_advertise: Option<String>,
    /// The address that clients reach [`client_listen`](Self::client_listen) at, as `host:port`.
    /// `None`: where it listens. Shown by the cluster's status.
    pub client_advertise: Option<String>,
    /// Log entries between two snapshots: after each, the entries before it are given up. Fewer take
    /// less disk and a shorter start, and write the whole state more often.
    pub snapshot_every: u64,
    /// The object store that all controllers of the group share for model files. `None`: each keeps
    /// them on its own disk. The same for every one of them; the cluster's status warns otherwise.
    pub artifacts: Option<SharedPlace>,
    /// The preset to schedule by until an operator sets a policy. `None`: the default preset.
    pub preset: Option<PresetName>,
    /// Serves fault injection. For tests and demonstrations.
    pub allow_faults: bool,
    /// Serves the fault service on the internal port: anyone who reaches that may move this
    /// controller's clock and stall its disk. For tests.
    pub fault_injection: bool,
    /// Serves anyone who can connect, without encryption or authentication. Without it, only
    /// loopback addresses are listened at.
    pub insecure: bool,
    /// Names that clients may call it by, beside `localhost` and the hosts of
    /// [`client_listen`](Self::client_listen) and [`client_advertise`](Self::client_advertise).
    /// Requests to others are refused: a web page could have made them lead here.
    pub host_names: Vec<String>,
    /// Bounds on what clients may ask.
    pub limits: Limits,
    /// Where uploaded models are checked.
    pub inspection: Inspection,
    /// Where random choices begin. The edge draws it from the system; tests fix it.
    pub seed: u64,
    /// Where stamps come from.
    pub clock: Arc<dyn WallClock>,
    /// Where this process keeps its spans, if it does.
    pub kept: Option<Kept>,
    /// The runtime that carries out Raft, which requests then cannot delay (see [`RaftRuntime`]). `None`: the
    /// one that the controller is started in.
    ///
    /// [`RaftRuntime`]: crate::RaftRuntime
    pub raft_runtime: Option<tokio::runtime::Handle>,
}

impl ControllerConfig {
    /// Every default, on loopback: the first controller of a cluster of its own. Models are checked in
    /// this process: a server names a program for that, see [`Self::inspection`].
    #[must_use]
    pub fn new(data_dir: PathBuf, seed: u64) -> Self {
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self {
            id: ControllerId(1),
            start: Start::Bootstrap,
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
            limits: Limits::default(),
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
/// Memory of the processes that check uploaded models, all together.
pub(crate) const INSPECTION_MEMORY: Bytes = Bytes::gib(8);

/// Bounds on what clients may ask.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The largest model file.
    pub artifact_bytes: Bytes,
    /// Uploads at a time.
    pub uploads: usize,
    /// How long a model file that no function uses is kept.
    pub artifact_grace: Duration,
    /// Model files kept here of those that are in the object store. Trimmed as often as unused ones
    /// are looked for.
    pub artifact_cache: Bytes,
    /// How often unused model files are looked for.
    pub collect_every: Duration,
    /// How long a silent worker is still believed alive.
    pub lease: lease::Limits,
    /// Connections of the port for clients.
    pub client: PortLimits,
    /// Connections of the port for workers and other controllers.
    pub internal: PortLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            artifact_bytes: Bytes::gib(16),
            uploads: 32,
            artifact_grace: Duration::from_secs(3600),
            artifact_cache: Bytes::gib(64),
            collect_every: Duration::from_secs(60),
            lease: lease::Limits::default(),
            client: PortLimits::new(4_096),
            internal: PortLimits::new(1_024),
        }
    }
}
