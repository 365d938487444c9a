//! The start of a node's actors.

use crate::handle::NodeHandle;
pub use crate::node_config::{DataConfig, IN_FLIGHT_MAX, NodeConfig, NodeContext, REQUESTS_MAX};
use crate::supervisor::Supervisor;
pub use crate::traced_core::SharedTrace;

/// Starts a node's actors on this thread, which must run an actix system. Simulations call this
/// function, because their actors run in the simulation's own time.
#[must_use]
pub fn start_here(config: NodeConfig, context: NodeContext) -> NodeHandle {
    Supervisor::start(config, context)
}

#[cfg(test)]
mod tests;
