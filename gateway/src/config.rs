//! The configuration of a gateway: limits, authentication, a clock and a seed.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use millrace_transport::{MinimumRate, PortLimits, ServerConfig};
use millrace_types::Bytes;

use crate::activity::Activity;
use crate::authentication::{Authenticate, LoopbackOnly};

/// Returns the wall-clock time as the time since 1970. Used only for records, never for waiting.
pub type WallClock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Configuration of a gateway, except the backend.
#[derive(Clone)]
pub struct GatewayConfig {
    pub limits: GatewayLimits,
    /// Authentication of callers.
    pub authenticate: Arc<dyn Authenticate>,
    /// Clock for request ids and for the time of the last inference.
    pub wall_clock: WallClock,
    /// Host names under which clients may call the gateway, besides `localhost` and the listening address.
    pub host_names: Vec<String>,
    /// Seed for request ids. Two gateways of a cluster must not share it.
    pub seed: u64,
    /// Counts of the gateway, shared with all clones.
    pub activity: Activity,
}

impl GatewayConfig {
    /// Returns a configuration with the default limits, for callers of this machine only.
    #[must_use]
    pub fn new(wall_clock: WallClock, seed: u64) -> Self {
        Self {
            limits: GatewayLimits::default(),
            authenticate: Arc::new(LoopbackOnly::default()),
            wall_clock,
            host_names: Vec::new(),
            seed,
            activity: Activity::default(),
        }
    }
}

impl fmt::Debug for GatewayConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayConfig")
            .field("limits", &self.limits)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// Bytes in memory that requests to the admin API may use, in addition to [`GatewayLimits::in_flight_max`].
/// So an operator can always delete a function even if its clients fill that limit.
pub(crate) const ADMIN_IN_FLIGHT_MAX: Bytes = Bytes::mib(64);
/// Flow-control window of an HTTP/2 stream, in bytes. These bytes are not charged to the byte budget:
/// see [`ServerConfig::windows_max`].
const STREAM_WINDOW: u32 = 128 << 10;
/// Flow-control window of an HTTP/2 connection, in bytes: eight times the stream's window, so that
/// seven streams that wait for their responses do not block another stream.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Maximum bytes of the flow-control windows of all connections of the port: enough for 256 connections;
/// further ones get the smallest window.
const WINDOWS_MAX: u32 = 256 << 20;
/// Largest message to a service that does no inference.
const ADMIN_MESSAGE_MAX: Bytes = Bytes::mib(4);

/// Most functions with their own labels in metrics; further functions share `_other`.
pub(crate) const LABELLED_FUNCTIONS_MAX: usize = 1000;

/// The bounds of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayLimits {
    /// Largest message, both as received and after decompression.
    pub message_max: Bytes,
    /// Most bytes of inference requests and responses in memory. At least `message_max`,
    /// because otherwise the largest messages could never be served.
    pub in_flight_max: Bytes,
    /// Most requests that wait for their model to become ready; further requests are refused at once.
    pub waiting_max: usize,
    /// Longest time that a request waits for a model without workers: a lease, and the time in which
    /// another worker takes over. After that, the client may find another gateway that sees more
    /// workers.
    pub away_max: Duration,
    /// Bounds of connections and streams.
    pub server: ServerConfig,
    /// Most requests of a gRPC stream that run at a time; further requests wait in the client.
    pub stream_concurrency: usize,
    /// Minimum rate at which a client must send a message that has begun, and read a response.
    pub minimum_rate: MinimumRate,
}

impl Default for GatewayLimits {
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

impl GatewayLimits {
    /// Returns the largest message to a service that does no inference.
    pub(crate) fn admin_message_max(&self) -> Bytes {
        ADMIN_MESSAGE_MAX.min(self.message_max)
    }
}

/// Converts a message limit to a length in memory. gRPC's lengths have 32 bits.
pub(crate) fn message_len(max: Bytes) -> usize {
    u32::try_from(max.get()).unwrap_or(u32::MAX) as usize
}
