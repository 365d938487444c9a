//! The endpoints of other processes of the cluster.

use std::time::Duration;

use millrace_transport::channel::ChannelConfig;
use tonic::transport::Endpoint;

/// Interval between keep-alive pings on an idle connection, and the time allowed for the response.
/// A controller that vanishes silently is noticed within twice this.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Returns the endpoint of another process of the cluster.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    millrace_transport::channel::endpoint(address, ChannelConfig::watched(KEEP_ALIVE))
}
