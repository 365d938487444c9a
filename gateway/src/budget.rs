//! The byte budget: a bound on the bytes of clients' messages and of responses in memory.
//!
//! ```text
//! ByteBudget  all connections together: the capacity, and since when the budget has been full
//!   └─ BudgetShare   one connection: a single message of any size, or `share_max` bytes
//!        └─ ByteCharge    one message or response: grows as bytes arrive, releases them when dropped
//! ```
//!
//! Bytes are charged when they arrive, and not when they are announced. A charge that has bytes never
//! waits for more: it is refused, and its owner drops it, so two messages cannot deadlock. The
//! messages of a stream wait for capacity before any bytes are charged ([`BudgetShare::room_for`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_types::{Bytes, Failure, Reason};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Divisor of the budget for the share of a connection: 12.5%.
const SHARE_OF_CONNECTION: u64 = 8;
/// Size in bytes of a small request. A server without capacity for a small request is full.
const SMALL_REQUEST: u64 = 64 << 10;
/// Time without capacity for a small request after which the server reports not ready.
pub(crate) const LOCKED_OUT_AFTER: Duration = Duration::from_secs(5);
/// Smallest number of bytes that a response releases of its request's charge. Fewer bytes are not
/// worth two atomic operations.
const SHRINK_MIN: u64 = 64 << 10;

/// Bytes that all connections together may use.
#[derive(Debug, Clone)]
pub(crate) struct ByteBudget(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    capacity: u64,
    /// Most bytes that a connection may use with several messages.
    share_max: u64,
    used: AtomicU64,
    /// Number of messages that wait for `freed`.
    waiting: AtomicUsize,
    freed: Notify,
    origin: Instant,
    /// Time since which there is no capacity for a small request: milliseconds after `origin`, plus
    /// 1 ms. The value is 0 while there is capacity.
    full_since: AtomicU64,
}

/// A connection's share of a budget. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct BudgetShare(Arc<Share>);

#[derive(Debug)]
struct Share {
    budget: ByteBudget,
    used: AtomicU64,
}

/// Bytes of a message or response. Dropping the charge releases the bytes.
#[derive(Debug)]
pub(crate) struct ByteCharge {
    share: BudgetShare,
    bytes: u64,
}

impl ByteBudget {
    /// Creates a budget of `capacity` for messages of up to `message_max`. The capacity is at least
    /// `message_max`.
    pub(crate) fn new(capacity: Bytes, message_max: Bytes) -> Self {
        let capacity = capacity.max(message_max).get();
        Self(Arc::new(Pool {
            capacity,
            share_max: message_max.get().max(capacity / SHARE_OF_CONNECTION),
            used: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            freed: Notify::new(),
            origin: Instant::now(),
            full_since: AtomicU64::new(0),
        }))
    }

    /// Returns the charged bytes.
    pub(crate) fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// Creates the share of a new connection.
    pub(crate) fn share(&self) -> BudgetShare {
        BudgetShare(Arc::new(Share { budget: self.clone(), used: AtomicU64::new(0) }))
    }

    /// Whether there has been no capacity for a small request for [`LOCKED_OUT_AFTER`].
    pub(crate) fn is_locked_out(&self) -> bool {
        if self.0.has_room(self.used()) {
            self.0.full_since.store(0, Ordering::Relaxed);
            return false;
        }
        self.0.full_for() >= LOCKED_OUT_AFTER
    }
}

impl Pool {
    fn has_room(&self, used: u64) -> bool {
        self.capacity.saturating_sub(used) >= SMALL_REQUEST.min(self.capacity / 16)
    }

    fn reserve(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.capacity);
        let before = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        if before.is_err() || before.is_ok_and(|used| !self.has_room(used + bytes)) {
            self.full_for();
        }
        before.is_ok()
    }

    fn release(&self, bytes: u64) {
        // SeqCst here and in `room_for`: a waiter that does not see these freed bytes has counted
        // itself before the check of `waiting` below.
        let used = self.used.fetch_sub(bytes, Ordering::SeqCst) - bytes;
        if self.full_since.load(Ordering::Relaxed) != 0 && self.has_room(used) {
            self.full_since.store(0, Ordering::Relaxed);
        }
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.freed.notify_waiters();
        }
    }

    /// Returns the time since the first call that found no capacity, if no call in between found any.
    fn full_for(&self) -> Duration {
        let since = self.full_since.load(Ordering::Relaxed);
        let now = self.origin.elapsed();
        if since == 0 {
            let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX - 1);
            self.full_since.store(now_ms + 1, Ordering::Relaxed);
        }
        now.saturating_sub(Duration::from_millis(since.checked_sub(1).unwrap_or(u64::MAX)))
    }
}

impl BudgetShare {
    /// Charges `bytes`, or refuses with `BYTE_BUDGET_EXCEEDED`.
    pub(crate) fn try_take(&self, bytes: u64) -> Result<ByteCharge, Failure> {
        let mut charge = ByteCharge { share: self.clone(), bytes: 0 };
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Charges `bytes` that are already in memory, even beyond the capacity.
    pub(crate) fn take_held(&self, bytes: u64) -> ByteCharge {
        self.0.used.fetch_add(bytes, Ordering::Relaxed);
        self.0.budget.0.used.fetch_add(bytes, Ordering::Relaxed);
        ByteCharge { share: self.clone(), bytes }
    }

    /// Waits until `bytes` would fit, without charging: another message may take the capacity first.
    /// The caller must have no charge in the meantime. Never returns for more bytes than the
    /// whole budget has.
    pub(crate) async fn room_for(self, bytes: u64) {
        let pool = &self.0.budget.0;
        let _waiting = Waiting::new(pool);
        loop {
            let mut freed = std::pin::pin!(pool.freed.notified());
            // Registered before the check, so that a release in between is not missed.
            freed.as_mut().enable();
            if self.has_room_for(bytes) {
                return;
            }
            freed.await;
        }
    }

    /// Whether `bytes` would fit now.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        let Share { budget: ByteBudget(pool), used } = &*self.0;
        let of_connection = used.load(Ordering::SeqCst);
        let fits = of_connection == 0 || of_connection.saturating_add(bytes) <= pool.share_max;
        fits && pool.used.load(Ordering::SeqCst).saturating_add(bytes) <= pool.capacity
    }

    /// Charges `more` bytes for a charge that already has `own` bytes.
    fn reserve(&self, own: u64, more: u64) -> Result<(), Failure> {
        let Share { budget: ByteBudget(pool), used } = &*self.0;
        // The only message of a connection may have the full size of a message.
        let fits = |used: u64| {
            let sum = used.saturating_add(more);
            (used == own || sum <= pool.share_max).then_some(sum)
        };
        if used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return Err(Failure::new(
                Reason::ByteBudgetExceeded,
                format!(
                    "{more} more bytes would exceed the {} that one connection may hold: try again when some \
                     of its requests are answered, or over another connection",
                    Bytes(pool.share_max)
                ),
            ));
        }
        if pool.reserve(more) {
            return Ok(());
        }
        used.fetch_sub(more, Ordering::Relaxed);
        Err(Failure::new(
            Reason::ByteBudgetExceeded,
            format!(
                "{more} more bytes would exceed the {} that requests in flight may hold: try again when some \
                 are answered",
                Bytes(pool.capacity)
            ),
        ))
    }

    fn release(&self, bytes: u64) {
        self.0.used.fetch_sub(bytes, Ordering::SeqCst);
        self.0.budget.0.release(bytes);
    }
}

/// Counts a waiting message until the value is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(pool: &'a Pool) -> Self {
        pool.waiting.fetch_add(1, Ordering::SeqCst);
        Self(&pool.waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ByteCharge {
    /// Charges `more` bytes in addition, or refuses with `BYTE_BUDGET_EXCEEDED`.
    pub(crate) fn grow(&mut self, more: u64) -> Result<(), Failure> {
        if more > 0 {
            self.share.reserve(self.bytes, more)?;
            self.bytes += more;
        }
        Ok(())
    }

    /// Turns the charge of a request into the charge of its response of `bytes`. Refused if the
    /// response is larger and does not fit, although the request was executed.
    pub(crate) fn become_response(&mut self, bytes: u64) -> Result<(), Failure> {
        if bytes > self.bytes {
            return self.grow(bytes - self.bytes).map_err(Failure::after_execution);
        }
        self.settle(bytes);
        Ok(())
    }

    /// Changes the charge to `bytes` that are already in memory, even beyond the capacity.
    pub(crate) fn settle(&mut self, bytes: u64) {
        if bytes > self.bytes {
            self.merge(self.share.take_held(bytes - self.bytes));
        } else if self.bytes - bytes >= SHRINK_MIN {
            drop(self.split(self.bytes - bytes));
        }
    }

    /// Splits off a charge of `bytes`. Bytes that this charge lacks are already in memory, and are
    /// charged now.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        if bytes > self.bytes {
            self.merge(self.share.take_held(bytes - self.bytes));
        }
        self.bytes -= bytes;
        Self { share: self.share.clone(), bytes }
    }

    /// Merges another charge of the same connection into this one.
    pub(crate) fn merge(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for ByteCharge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.share.release(self.bytes);
        }
    }
}

/// Returns the failure of a message over its size limit. Not retryable, because the same message will
/// never fit.
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
    use proptest::prelude::*;

    use super::*;

    fn budget(capacity: u64, message_max: u64) -> ByteBudget {
        ByteBudget::new(Bytes(capacity), Bytes(message_max))
    }

    #[test]
    fn bytes_beyond_the_budget_are_refused_and_dropped_charges_are_released() {
        let budget = budget(10, 10);
        let connection = budget.share();
        let mut held = connection.try_take(6).unwrap();
        assert_eq!(connection.try_take(5).unwrap_err().reason, Reason::ByteBudgetExceeded);
        assert!(held.grow(5).is_err());
        held.grow(4).unwrap();
        assert_eq!(budget.used(), 10);
        drop(held);
        assert_eq!(budget.used(), 0);
        assert!(connection.try_take(u64::MAX).is_err());
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_connection_may_use_one_message_of_any_size_or_its_share() {
        let budget = budget(1000, 100);
        let connection = budget.share();
        let held = connection.try_take(100).unwrap();
        let refused = connection.try_take(26).unwrap_err();
        assert!(refused.message.contains("one connection") && refused.retryable, "{refused}");
        let small = connection.try_take(25).unwrap();
        assert_eq!(budget.used(), 125);
        let other = budget.share().try_take(100).unwrap();
        drop((held, small, other));
        // The only message may grow beyond the share of its connection, for data that is made of the
        // received bytes.
        let mut only = connection.try_take(100).unwrap();
        only.grow(500).unwrap();
        assert!(connection.try_take(1).is_err());
        drop(only);
        assert!(connection.try_take(1).is_ok());
    }

    #[tokio::test]
    async fn a_stream_message_waits_until_bytes_are_freed() {
        let budget = budget(10, 10);
        let held = budget.share().try_take(6).unwrap();
        let mut waiting = std::pin::pin!(budget.share().room_for(5));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        drop(held);
        waiting.await;
        assert_eq!(budget.used(), 0, "waiting charges nothing");
    }

    #[test]
    fn the_charge_of_a_request_becomes_that_of_its_response() {
        let budget = budget(1 << 20, 1 << 20);
        let connection = budget.share();
        let mut charge = connection.try_take(1000).unwrap();
        charge.become_response(3000).unwrap();
        assert_eq!(budget.used(), 3000);
        let refused = charge.become_response(2 << 20).unwrap_err();
        assert!(refused.retryable && refused.may_have_executed);
        charge.become_response(1 << 20).unwrap();
        charge.become_response(10).unwrap();
        assert_eq!(budget.used(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_full_for_seconds_is_locked_out_until_bytes_are_freed() {
        let budget = budget(1 << 30, 1 << 30);
        let mut held = budget.share().try_take((1 << 30) - 1).unwrap();
        assert!(!budget.is_locked_out());
        tokio::time::advance(LOCKED_OUT_AFTER - Duration::from_millis(1)).await;
        assert!(!budget.is_locked_out());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(budget.is_locked_out());
        drop(held.split(1 << 20));
        assert!(!budget.is_locked_out());
        held.grow(1 << 20).unwrap();
        assert!(!budget.is_locked_out(), "free capacity in between restarts the time");
        tokio::time::advance(LOCKED_OUT_AFTER).await;
        assert!(budget.is_locked_out());
    }

    proptest! {
        /// After any sequence of operations, the budget equals the sum of all charges.
        #[test]
        fn a_budget_equals_the_sum_of_its_charges(
            steps in proptest::collection::vec((0u8..6, 0usize..4, 0u64..2000), 0..60),
        ) {
            let budget = budget(4000, 1000);
            let connections = [budget.share(), budget.share()];
            let mut charges: [Vec<ByteCharge>; 2] = [Vec::new(), Vec::new()];
            for (step, at, bytes) in steps {
                let held = &mut charges[at % 2];
                let last = held.len().checked_sub(1);
                match (step, last) {
                    (0, _) => held.extend(connections[at % 2].try_take(bytes)),
                    (1, Some(last)) => drop(held[last].grow(bytes)),
                    (2, Some(last)) => drop(held[last].become_response(bytes)),
                    (3, Some(last)) => {
                        let split = held[last].split(bytes);
                        held.push(split);
                    }
                    (4, Some(last)) if last > 0 => {
                        let other = held.remove(last);
                        held[0].merge(other);
                    }
                    (5, Some(_)) => drop(held.remove(0)),
                    _ => {}
                }
                let sum: u64 = charges.iter().flatten().map(|charge| charge.bytes).sum();
                prop_assert_eq!(budget.used(), sum);
            }
            drop(charges);
            prop_assert_eq!(budget.used(), 0);
            prop_assert!(connections.iter().all(|connection| connection.0.used.load(Ordering::Relaxed) == 0));
        }
    }
}
