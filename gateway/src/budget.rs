//! The byte budget: how much of clients' messages may be in memory at a time.
//!
//! A message is charged when its size is known, before its bytes are stored, and again for what it
//! expands to. Dropping the [`Charge`] gives the bytes back. Calls are refused when the budget is
//! spent; messages of a stream wait, and their client with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_types::{Bytes, Failure, Reason};
use tokio::sync::Notify;

/// Bytes that may be held, shared by everyone who holds some.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    capacity: u64,
    used: AtomicU64,
    freed: Notify,
}

/// Bytes held. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Budget,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(capacity: Bytes) -> Self {
        let shared = Shared { capacity: capacity.get(), used: AtomicU64::new(0), freed: Notify::new() };
        Self(Arc::new(shared))
    }

    /// Bytes held now.
    pub(crate) fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// Takes `bytes`, or refuses with `BYTE_BUDGET_EXCEEDED`.
    pub(crate) fn try_take(&self, bytes: u64) -> Result<Charge, Failure> {
        if self.reserve(bytes) {
            return Ok(Charge { budget: self.clone(), bytes });
        }
        Err(Failure::new(
            Reason::ByteBudgetExceeded,
            format!(
                "{} more bytes would pass the {} that requests in flight may hold: try again when some \
                 are answered",
                bytes,
                Bytes(self.0.capacity)
            ),
        ))
    }

    /// Takes `bytes` once they are free. Never ends when they exceed the capacity: refuse those first.
    pub(crate) async fn take(self, bytes: u64) -> Charge {
        loop {
            let mut freed = std::pin::pin!(self.0.freed.notified());
            // Registered before looking, so that what is freed in between is not missed.
            freed.as_mut().enable();
            if self.reserve(bytes) {
                return Charge { budget: self.clone(), bytes };
            }
            freed.await;
        }
    }

    fn reserve(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.0.capacity);
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }
}

impl Charge {
    /// Takes `more` bytes on top, or refuses with `BYTE_BUDGET_EXCEEDED`.
    pub(crate) fn grow(&mut self, more: u64) -> Result<(), Failure> {
        let mut taken = self.budget.try_take(more)?;
        self.bytes += std::mem::take(&mut taken.bytes);
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.0.used.fetch_sub(self.bytes, Ordering::Relaxed);
            self.budget.0.freed.notify_waiters();
        }
    }
}

/// A message over its limit: sending it again unchanged cannot help.
pub(crate) fn too_large(what: &str, limit: usize) -> Failure {
    Failure {
        retryable: false,
        ..Failure::new(
            Reason::ByteBudgetExceeded,
            format!("{what} is larger than the {} a message may have: split the batch", Bytes(limit as u64)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_does_not_fit_and_gets_it_back() {
        let budget = Budget::new(Bytes(10));
        let mut held = budget.try_take(6).unwrap();
        assert_eq!(budget.try_take(5).unwrap_err().reason, Reason::ByteBudgetExceeded);
        assert!(held.grow(5).is_err());
        held.grow(4).unwrap();
        assert_eq!(budget.used(), 10);
        drop(held);
        assert_eq!(budget.used(), 0);
        assert!(budget.try_take(u64::MAX).is_err());
    }

    #[tokio::test]
    async fn a_waiter_goes_on_when_bytes_are_freed() {
        let budget = Budget::new(Bytes(10));
        let held = budget.try_take(6).unwrap();
        let waiter = tokio::spawn(budget.clone().take(5));
        while Arc::strong_count(&budget.0) < 3 {
            tokio::task::yield_now().await;
        }
        drop(held);
        assert_eq!(waiter.await.unwrap().bytes, 5);
        assert_eq!(budget.used(), 0);
    }
}
