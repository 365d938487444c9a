//! The byte budget of requests in flight. A request's inputs are counted before any other work, and
//! a request that would exceed the budget is refused.

use millrace_types::{Bytes, Failure, Reason};
use tokio::sync::{Semaphore, SemaphorePermit};

/// A budget of bytes, counted in whole KiB.
#[derive(Debug)]
pub(super) struct ServiceByteBudget {
    kib: Semaphore,
    size: Bytes,
}

impl ServiceByteBudget {
    pub(super) fn new(size: Bytes) -> Self {
        let kib = usize::try_from(size.get() >> 10).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { kib: Semaphore::new(kib), size }
    }

    pub(super) fn take(&self, bytes: usize) -> Result<SemaphorePermit<'_>, Failure> {
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        self.kib.try_acquire_many(kib).map_err(|_full| {
            let message =
                format!("the inputs of requests in flight fill the worker's {}: try again soon", self.size);
            Failure::new(Reason::ByteBudgetExceeded, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_request_returns_its_bytes_to_the_budget() {
        let budget = ServiceByteBudget::new(Bytes(4096));
        let first = budget.take(3000).unwrap();
        assert_eq!(budget.take(1500).unwrap_err().reason, Reason::ByteBudgetExceeded);
        drop(first);
        assert!(budget.take(4096).is_ok());
    }
}
