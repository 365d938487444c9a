//! What a node is made of, and how its actors are started.

use std::sync::Arc;

use millrace_types::topology::Topology;

use crate::clock::{Clock, MonotonicClock};
use crate::port::Spawner;

/// Requests the worker holds at one time, counting those on GPUs: the permits of
/// [`crate::handle::NodeHandle`].
pub const REQUESTS_MAX: u32 = 4096;
/// Requests that one function may have in flight.
pub const IN_FLIGHT_MAX: u32 = 2048;

/// What a node is.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Its GPUs and links.
    pub topology: Topology,
    /// Requests it holds at one time, waiting and running.
    pub requests_max: u32,
    /// Requests that one function may have in flight.
    pub in_flight_max: u32,
}

impl NodeConfig {
    /// A node with these GPUs and the default limits.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        Self { topology, requests_max: REQUESTS_MAX, in_flight_max: IN_FLIGHT_MAX }
    }
}

/// The world a node lives in: everything that differs between production and simulation.
pub struct NodeContext {
    /// Time.
    pub(crate) clock: Arc<dyn Clock>,
    /// Spreads restarts.
    pub(crate) seed: u64,
    /// Makes executors.
    pub(crate) spawner: Box<dyn Spawner>,
}

impl NodeContext {
    /// A node on the machine's own clock.
    #[must_use]
    pub fn new(seed: u64, spawner: Box<dyn Spawner>) -> Self {
        Self { clock: Arc::new(MonotonicClock), seed, spawner }
    }

    /// The same on another clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }
}
