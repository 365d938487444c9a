//! Bounds of a server, and the HTTP settings that follow from them.

use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioTimer;

use crate::pace::MinimumRate;
use crate::port_limits::PortLimits;
use crate::stream_timeout::StreamExecutor;
use crate::violations::AddressViolations;

/// Most bytes of an HTTP/1.1 request's head, and most bytes of its body that are buffered unread.
const HTTP1_BUFFER_MAX: usize = 64 << 10;
/// Most bytes of an HTTP/2 request's headers.
const HEADER_LIST_MAX: u32 = 16 << 10;
/// Largest HTTP/2 frame that is accepted, in bytes. The size is above the protocol's default so that
/// large tensors arrive in fewer pieces.
const FRAME_MAX: u32 = 256 << 10;
/// Initial window of an HTTP/2 connection in bytes, which is also the smallest possible.
const NARROW_WINDOW: u32 = 65_535;
/// Most bytes of a response that are buffered for an HTTP/2 stream.
const SEND_BUFFER_MAX: usize = 1 << 20;

/// Bounds of a server. A connection's time limits apply in the order `opening_max`, `head_max`,
/// `idle_max`; each must be at most as long as the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Connection limits of the port.
    pub port: PortLimits,
    /// Time limit for a connection's first bytes. These are HTTP/2's preface with the head of the
    /// SETTINGS frame, or the first byte of an HTTP/1.1 request.
    pub opening_max: Duration,
    /// Time limit for a request's head, and for an idle HTTP/1.1 connection.
    pub head_max: Duration,
    /// Time without a request under way after which a connection is ended.
    pub idle_max: Duration,
    /// Most concurrent calls on an HTTP/2 connection.
    pub streams_max: u32,
    /// Flow-control window of an HTTP/2 stream, in bytes.
    pub stream_window: u32,
    /// Flow-control window of an HTTP/2 connection, in bytes.
    pub connection_window: u32,
    /// Most bytes of all connections' windows of the port together. Further connections get the
    /// smallest window that HTTP/2 allows, 64 KiB.
    pub windows_max: u32,
    /// Interval of keep-alive pings to a quiet HTTP/2 peer.
    pub keep_alive_every: Duration,
    /// Time in which the peer must answer a keep-alive ping.
    pub keep_alive_max: Duration,
    /// Minimum rate at which a client must read responses. On a port for other processes, also the
    /// minimum rate at which a client must send a message that has begun. `None` allows any rate.
    pub minimum_rate: Option<MinimumRate>,
    /// Most bytes of all messages that are arriving. Applies to a port for other processes.
    pub arriving_max: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            port: PortLimits::new(1024),
            opening_max: Duration::from_secs(5),
            head_max: Duration::from_secs(75),
            idle_max: Duration::from_secs(300),
            streams_max: 128,
            stream_window: 1 << 20,
            connection_window: 2 << 20,
            windows_max: 1 << 30,
            keep_alive_every: Duration::from_secs(60),
            keep_alive_max: Duration::from_secs(30),
            minimum_rate: Some(MinimumRate::PEER),
            arriving_max: 256 << 20,
        }
    }
}

impl ServerConfig {
    /// Returns the number of connections that get the configured windows.
    pub(crate) fn roomy_max(&self) -> usize {
        let connections = self.windows_max / self.connection_window.max(NARROW_WINDOW);
        usize::try_from(connections.max(1)).unwrap_or(1)
    }

    pub(crate) fn http1(&self) -> http1::Builder {
        let mut builder = http1::Builder::new();
        builder
            .writev(true)
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_max)
            .max_buf_size(HTTP1_BUFFER_MAX);
        builder
    }

    /// Returns the HTTP/2 settings; only a `roomy` connection gets the configured windows.
    pub(crate) fn http2(&self, roomy: bool, conduct: AddressViolations) -> http2::Builder<StreamExecutor> {
        let window_max = if roomy { u32::MAX } else { NARROW_WINDOW };
        let mut builder = http2::Builder::new(StreamExecutor { minimum: self.minimum_rate, conduct });
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(self.stream_window.min(window_max))
            .initial_connection_window_size(self.connection_window.min(window_max))
            .max_frame_size(FRAME_MAX)
            .max_header_list_size(HEADER_LIST_MAX)
            .max_send_buf_size(SEND_BUFFER_MAX)
            .max_concurrent_streams(self.streams_max)
            .keep_alive_interval(self.keep_alive_every)
            .keep_alive_timeout(self.keep_alive_max);
        builder
    }
}
