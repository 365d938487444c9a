//! The request that a run of a workflow and its nested runs serve.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use millrace_types::{Failure, Reason, RequestId};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::passed::RunTraffic;

/// Concurrent function calls of a request, including nested workflows.
const OUT_MAX: usize = 64;
/// Function calls of a request in total.
const CALLS_MAX: u32 = 65_536;

/// The request that a run and its nested runs serve.
#[derive(Debug)]
pub(super) struct WorkflowRequest {
    pub(super) id: RequestId,
    pub(super) deadline: Instant,
    pub(super) priority: u64,
    /// The traffic between the called functions.
    pub(super) passing: RunTraffic,
    /// Permits of function calls in progress.
    pub(super) out: Semaphore,
    calls: AtomicU32,
}

impl WorkflowRequest {
    pub(super) fn new(id: RequestId, timeout: Duration, priority: u64) -> Self {
        let out = Semaphore::new(OUT_MAX);
        let calls = AtomicU32::new(0);
        let passing = RunTraffic::default();
        Self { id, deadline: Instant::now() + timeout, priority, passing, out, calls }
    }

    /// Counts a call; refuses calls beyond [`CALLS_MAX`].
    pub(super) fn call(&self) -> Result<(), Failure> {
        if self.calls.fetch_add(1, Ordering::Relaxed) < CALLS_MAX {
            return Ok(());
        }
        let message = format!("the request needs more than {CALLS_MAX} function calls: send fewer rows");
        Err(Failure::new(Reason::InvalidInput, message))
    }
}

/// The nesting depth of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Depth(pub(super) usize);

impl Depth {
    /// The depth of a run that is not nested.
    pub(super) const TOP: Self = Self(0);
}
