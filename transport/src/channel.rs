//! Connections to other processes.

use std::time::Duration;

use tonic::transport::{Endpoint, Error};

/// Time in which a connection has to be made.
pub const CONNECT_MAX: Duration = Duration::from_secs(2);

/// What a channel is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChannelConfig {
    /// Interval between the questions to a quiet peer whether it is there, and the time that it has to
    /// answer. `None`: it is not asked.
    pub keep_alive: Option<Duration>,
    /// Whether a peer is asked while no call is under way.
    pub keep_alive_while_idle: bool,
    /// Bytes of one call's answer, and of all answers of the connection, that may be on their way
    /// unread. `None`: HTTP/2's defaults.
    pub windows: Option<(u32, u32)>,
}

impl ChannelConfig {
    /// A peer that vanished without a word is noticed in twice `interval`, also while it is idle.
    #[must_use]
    pub const fn watched(interval: Duration) -> Self {
        Self { keep_alive: Some(interval), keep_alive_while_idle: true, windows: None }
    }
}

/// The way to `authority`, which is `host:port`. Connecting is the caller's choice.
///
/// # Errors
/// When `authority` is no address.
pub fn endpoint(authority: &str, config: ChannelConfig) -> Result<Endpoint, Error> {
    let mut endpoint = Endpoint::from_shared(format!("http://{authority}"))?
        .connect_timeout(CONNECT_MAX)
        .tcp_nodelay(true)
        .keep_alive_while_idle(config.keep_alive_while_idle);
    if let Some(interval) = config.keep_alive {
        endpoint = endpoint.http2_keep_alive_interval(interval).keep_alive_timeout(interval);
    }
    if let Some((stream, connection)) = config.windows {
        endpoint = endpoint.initial_stream_window_size(stream).initial_connection_window_size(connection);
    }
    Ok(endpoint)
}
