//! What a front door is given: limits, who may call, a clock and a seed. Every bound has its name
//! here.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use millrace_transport::{MinimumRate, PortLimits, ServerConfig};
use millrace_types::Bytes;

use crate::activity::Activity;
use crate::auth::{Authenticate, LoopbackOnly};

/// Tells the wall-clock time, as the time since 1970. For records only, never for waiting.
pub type WallClock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Everything a front door needs besides its backend.
#[derive(Clone)]
pub struct FrontDoorConfig {
    /// The bounds it keeps.
    pub limits: Limits,
    /// Who may call.
    pub authenticate: Arc<dyn Authenticate>,
    /// For request ids and "last inference".
    pub wall_clock: WallClock,
    /// Names that clients may call it by, beside `localhost` and the address at which it listens.
    pub host_names: Vec<String>,
    /// For request ids: two front doors of one cluster must not share it.
    pub seed: u64,
    /// Shows what the front door counts, to whoever keeps a clone of it.
    pub activity: Activity,
}

impl FrontDoorConfig {
    /// The default limits, for callers of this machine only.
    #[must_use]
    pub fn new(wall_clock: WallClock, seed: u64) -> Self {
        Self {
            limits: Limits::default(),
            authenticate: Arc::new(LoopbackOnly::default()),
            wall_clock,
            host_names: Vec::new(),
            seed,
            activity: Activity::default(),
        }
    }
}

impl fmt::Debug for FrontDoorConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontDoorConfig")
            .field("limits", &self.limits)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// The bytes that requests to the admin API may take in memory, beside [`Limits::in_flight_max`], so
/// that an operator can always delete a function whose clients fill the latter.
pub(crate) const ADMIN_IN_FLIGHT_MAX: Bytes = Bytes::mib(64);
/// The unread bytes of one HTTP/2 stream. They are not charged to the byte budget: see
/// [`ServerConfig::windows_max`].
const STREAM_WINDOW: u32 = 128 << 10;
/// The same for one HTTP/2 connection: eight times that, so that seven streams that wait for their answers
/// hold no other up.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// The same for all connections of the port that have such windows: 256 of them.
const WINDOWS_MAX: u32 = 256 << 20;
/// The largest message to a service that does no inference.
const ADMIN_MESSAGE_MAX: Bytes = Bytes::mib(4);

/// Functions that have labels of their own in metrics; further ones share `_other`.
pub(crate) const LABELLED_FUNCTIONS_MAX: usize = 1000;

/// The bounds a front door keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The largest message, both as it arrives and after decompression.
    pub message_max: Bytes,
    /// The most bytes of inference requests and their answers in memory together. At least
    /// `message_max`, or the largest messages could never be served.
    pub in_flight_max: Bytes,
    /// Requests that may wait for their model to get ready; further ones are refused at once.
    pub waiting_max: usize,
    /// How long a request waits for a model whose workers are gone: a lease, and the time in which
    /// another worker takes over. Past it the client may find a front door that sees more of them.
    pub away_max: Duration,
    /// Bounds of connections and of their streams.
    pub server: ServerConfig,
    /// Requests of one gRPC stream that run at a time; further ones wait in the client.
    pub stream_concurrency: usize,
    /// How slowly a client may send a message that has begun, and take an answer.
    pub minimum_rate: MinimumRate,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_max: Bytes::mib(256),
            in_flight_max: Bytes::gib(1),
            waiting_max: 1024,
            away_max: Duration::from_secs(10),
            server: ServerConfig {
                port: PortLimits::new(4096),
                stream_window: STREAM_WINDOW,
                connection_window: CONNECTION_WINDOW,
                windows_max: WINDOWS_MAX,
                ..ServerConfig::default()
            },
            stream_concurrency: 64,
            minimum_rate: MinimumRate { grace: Duration::from_secs(5), bytes_per_sec: 64 << 10 },
        }
    }
}

impl Limits {
    /// The largest message to a service that does no inference.
    pub(crate) fn admin_message_max(&self) -> Bytes {
        ADMIN_MESSAGE_MAX.min(self.message_max)
    }
}

/// A limit of messages where a length in memory is meant. gRPC's lengths are 32 bits.
pub(crate) fn message_len(max: Bytes) -> usize {
    u32::try_from(max.get()).unwrap_or(u32::MAX) as usize
}
