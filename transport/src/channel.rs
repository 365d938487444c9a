//! Client channels to other processes.

use std::time::Duration;

use tonic::transport::{Endpoint, Error};

/// Longest time to establish a connection.
pub const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Options of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChannelConfig {
    /// Interval of keep-alive pings to a quiet peer, and the time that the peer has to answer a ping.
    /// `None` disables pings.
    pub keep_alive: Option<Duration>,
    /// Whether pings are sent while no call is under way.
    pub keep_alive_while_idle: bool,
    /// HTTP/2 windows in bytes: of a call's response, and of all responses of the connection. `None`
    /// selects HTTP/2's defaults.
    pub windows: Option<(u32, u32)>,
}

impl ChannelConfig {
    /// Returns options that detect a vanished peer within twice `interval`, also on an idle channel.
    #[must_use]
    pub const fn watched(interval: Duration) -> Self {
        Self { keep_alive: Some(interval), keep_alive_while_idle: true, windows: None }
    }
}

/// Returns the endpoint of `authority`, which is `host:port`. The caller decides when to connect.
///
/// # Errors
/// Fails if `authority` is not a valid address.
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
