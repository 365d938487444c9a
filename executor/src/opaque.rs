//! An opaque program, whose launches declare no reads (T06): what each is about to read is known only
//! when it is issued, and comes with the run. [`millrace_model::order`] records and follows the order;
//! this keeps it between runs. The worker is told what was recorded, and copies in the order of what all its
//! executors told from then on.
//!
//! A worker runs one that is installed on it as such, whose requests bring the reads. Nothing that is
//! published is one: the launches of models declare what they read. So they are tested with programs made
//! for it, here and through the worker (`worker/tests/real/opaque.rs`).
//!
//! What is known goes with the process, and none hears of what others recorded: the first run of a program
//! in each process waits for everything.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use millrace_model::order::{ReadOrder, Trace, Wait};
use millrace_types::Bytes;

use crate::plan::Plan;

/// What is known of an opaque program's reads.
#[derive(Debug)]
pub(crate) struct Opaque {
    /// Runs of a program come one after another, but from two threads.
    order: Mutex<ReadOrder>,
    whole: Range<u64>,
}

/// An opaque program that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("launch {0} of an opaque program declares what it reads")]
    Declared(usize),
}

impl Opaque {
    /// Takes a program's plan for an opaque one's where there are blocks to record it in. To run it
    /// whole is to read all of it.
    pub(crate) fn new(plan: &mut Plan, bytes: Bytes, block: u64) -> Result<Option<Self>, Error> {
        let Some(block) = NonZeroU64::new(block) else { return Ok(None) };
        if let Some(launch) = plan.steps.iter().position(|step| !step.spec.reads.is_empty()) {
            return Err(Error::Declared(launch));
        }
        let whole = 0..bytes.get();
        plan.whole.spec.reads = vec![whole.clone()];
        Ok(Some(Self { order: Mutex::new(ReadOrder::unknown(bytes.get(), block)), whole }))
    }

    /// Begins a run; whether its order is known already, so that it need not be looked at where all
    /// is loaded.
    pub(crate) fn begin(&self) -> (Trace, bool) {
        let order = self.order();
        (order.begin(), order.is_recorded())
    }

    /// What the run's next launch, which reads these bytes, has to wait for.
    pub(crate) fn wait_for<'a>(&'a self, trace: &mut Trace, reads: &'a [Range<u64>]) -> &'a [Range<u64>] {
        match self.order().on_launch(trace, reads) {
            Wait::Everything => std::slice::from_ref(&self.whole),
            Wait::Reads => reads,
        }
    }

    /// Ends a run that succeeded; returns by launch what it was the first to read, as far as is known now, if
    /// that is new.
    pub(crate) fn end(&self, trace: Trace) -> Vec<Vec<Range<u64>>> {
        let mut order = self.order();
        if order.end(trace).is_none() {
            return Vec::new();
        }
        order.first_reads()
    }

    fn order(&self) -> MutexGuard<'_, ReadOrder> {
        // No code of others runs under the lock: it is whole whoever panicked.
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
