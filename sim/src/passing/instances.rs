//! The instances of functions, through which requests pass. An instance has a GPU of its own, and serves
//! one request at a time, in the order of the requests' arrivals. The instance fetches all inputs at once,
//! computes, and stores its outputs. With data in host memory the instance copies its outputs there itself,
//! and is busy until then. With a store on the GPU the instance is free once the store has accepted the
//! outputs.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_core::ids::FunctionIndex;

use super::fabric::GpuSite;
use super::requests::SimulatedObjectKey;

/// The event that the end of a course causes.
#[derive(Debug, Clone, Copy)]
pub(super) enum CourseEnd {
    /// The CPU function of a request has ended.
    Decoded(usize),
    /// The instance has the request's own input from the host. The copy paid this time for call and pinning
    /// first.
    Loaded(usize, Duration),
    /// The instance has an input from another function.
    Fetched(usize),
    /// The memory of the read objects is released, so the instance computes.
    Released(usize),
    /// The instance has computed.
    Computed(usize),
    /// An output is where other functions can read it.
    Stored(SimulatedObjectKey),
    /// A response is in host memory.
    Responded {
        request: usize,
        function: usize,
    },
    Migrated(GpuSite, SimulatedObjectKey),
    Reloaded(GpuSite, SimulatedObjectKey),
    Refused(GpuSite, SimulatedObjectKey),
}

/// The request that an instance serves.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Job {
    pub(super) request: usize,
    /// The number of copies that the instance waits for.
    pub(super) pending: usize,
    /// The time at which the job began, in seconds.
    pub(super) began: f64,
    /// The time of the copy from the host, in seconds.
    pub(super) loads: f64,
    /// The time of the longest copy from another function, in seconds.
    pub(super) fetches: f64,
}

#[derive(Debug)]
pub(super) struct Instance {
    pub(super) app: usize,
    pub(super) function: usize,
    pub(super) site: GpuSite,
    /// The waiting requests, ordered by their arrival.
    pub(super) queue: BTreeSet<usize>,
    pub(super) job: Option<Job>,
}

impl Instance {
    pub(super) fn new(app: usize, function: usize, site: GpuSite) -> Self {
        Self { app, function, site, queue: BTreeSet::new(), job: None }
    }

    pub(super) fn index(&self) -> FunctionIndex {
        FunctionIndex((self.app * 64 + self.function) as u32)
    }
}
