//! The state of requests, and of the data that requests make.

use std::collections::BTreeMap;

use millrace_types::{Bytes, Timestamp};
use rand::Rng as _;

use super::fabric::GpuSite;
use super::outcome::PathBreakdown;
use super::setup::DataflowSetup;
use crate::workload::random;

/// The key of an object in the stores.
pub(super) type SimulatedObjectKey = u64;

/// A request's run of one function.
#[derive(Debug, Clone, Default)]
pub(super) struct Call {
    /// Whether the function runs in this request.
    pub(super) runs: bool,
    /// The number of inputs that are not ready yet. The request's own input counts as one.
    pub(super) missing: usize,
    /// The objects among the inputs that are ready.
    pub(super) inputs: Vec<SimulatedObjectKey>,
    /// The longest path through the workflow up to now.
    pub(super) way: PathBreakdown,
    /// The time of the end of the computation.
    pub(super) computed: Timestamp,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) app: usize,
    pub(super) replica: usize,
    pub(super) arrived: Timestamp,
    /// The factor of all sizes of the request.
    pub(super) factor: f64,
    pub(super) calls: Vec<Call>,
    /// The number of calls and responses that have not ended.
    pub(super) open: usize,
    /// The longest path through the workflow.
    pub(super) longest: PathBreakdown,
    /// The time of all copies from the host, in seconds.
    pub(super) loading: f64,
}

impl Request {
    /// Creates a request. Its random choices depend only on the seed and its number, so they are the same for
    /// every system.
    pub(super) fn new(
        setup: &DataflowSetup,
        number: usize,
        app: usize,
        replica: usize,
        arrived: Timestamp,
    ) -> Self {
        let mut rng = random(setup.seed, 1000 + number as u64);
        let factor = rng.random_range(setup.sizes.0..=setup.sizes.1);
        let workflow = &setup.apps[app].workflow;
        let mut calls = Vec::new();
        for (place, function) in workflow.functions.iter().enumerate() {
            let runs = rng.random_range(0..100) < function.runs;
            let missing = workflow.inputs_of(place).len() + usize::from(function.loads > Bytes::ZERO);
            calls.push(Call { runs, missing, ..Call::default() });
        }
        let responds = |place: usize| calls[place].runs && workflow.functions[place].response > Bytes::ZERO;
        let responses = (0..calls.len()).filter(|&place| responds(place)).count();
        let open = calls.iter().filter(|call| call.runs).count() + responses;
        let longest = PathBreakdown { compute: workflow.decode.as_secs_f64(), ..PathBreakdown::default() };
        Self { app, replica, arrived, factor, calls, open, longest, loading: 0.0 }
    }

    /// Returns a size multiplied by the factor of this request.
    pub(super) fn scaled(&self, size: Bytes) -> Bytes {
        Bytes((size.0 as f64 * self.factor) as u64)
    }
}

/// An object: data that a function makes for other functions.
#[derive(Debug)]
pub(super) struct SimulatedObject {
    pub(super) request: usize,
    pub(super) maker: usize,
    pub(super) size: Bytes,
    /// The GPU that made the object.
    pub(super) site: GpuSite,
    /// The functions that read the object. The position of a function is its consumer index in the store.
    pub(super) takers: Vec<usize>,
    /// The number of functions that have not read the object yet.
    pub(super) unread: usize,
}

pub(super) type SimulatedObjects = BTreeMap<SimulatedObjectKey, SimulatedObject>;
