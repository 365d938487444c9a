//! What a controller is started with, and its named bounds.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_types::Bytes;

use crate::clock::{SystemClock, WallClock};

/// The port for everything a client speaks.
pub const CLIENT_PORT: u16 = 8080;
/// The port for workers and other controllers.
pub const INTERNAL_PORT: u16 = 7070;

/// The largest message between a gateway and a worker: a request's tensors, or its answer's.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// How long connecting to a worker may take.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a quiet connection is tried, and how long the answer may take: a peer that vanished
/// without a word is noticed in twice this.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// How a controller is started.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Where it keeps everything. Locked while it runs.
    pub data_dir: PathBuf,
    /// Where clients connect. Port 0 takes a free one.
    pub client_listen: SocketAddr,
    /// Where workers and other controllers connect. Port 0 takes a free one.
    pub internal_listen: SocketAddr,
    /// Serves fault injection. For tests and demonstrations.
    pub allow_faults: bool,
    /// Serves anyone who can connect, without encryption or authentication. Without it, only
    /// loopback addresses are listened at.
    pub insecure: bool,
    /// Bounds on what clients may ask.
    pub limits: Limits,
    /// Where random choices begin. The edge draws it from the system; tests fix it.
    pub seed: u64,
    /// Where stamps come from.
    pub clock: Arc<dyn WallClock>,
}

impl ControllerConfig {
    /// Every default, on loopback.
    #[must_use]
    pub fn new(data_dir: PathBuf, seed: u64) -> Self {
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self {
            data_dir,
            client_listen: loopback(CLIENT_PORT),
            internal_listen: loopback(INTERNAL_PORT),
            allow_faults: false,
            insecure: false,
            limits: Limits::default(),
            seed,
            clock: Arc::new(SystemClock),
        }
    }
}

/// Bounds on what clients may ask.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The largest model file.
    pub artifact_bytes: Bytes,
    /// Uploads at a time.
    pub uploads: usize,
    /// How long an upload may go without a byte.
    pub upload_idle: Duration,
    /// How long a model file that no function uses is kept.
    pub artifact_grace: Duration,
    /// How often unused model files are looked for.
    pub collect_every: Duration,
    /// How long a worker that lost its stream is still believed alive.
    pub lease: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            artifact_bytes: Bytes::gib(16),
            uploads: 4,
            upload_idle: Duration::from_secs(30),
            artifact_grace: Duration::from_secs(3600),
            collect_every: Duration::from_secs(60),
            lease: Duration::from_secs(2),
        }
    }
}
