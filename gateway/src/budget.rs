//! The byte budget: how much of clients' messages and of their answers may be in memory at a time.
//!
//! ```text
//! Budget      all connections together: its capacity, and since when it has been full
//!   └─ BudgetShare   one connection: a single message of any size, or `share_max` bytes
//!        └─ Charge        one message or answer: grows as bytes arrive, gives them back when dropped
//! ```
//!
//! Bytes are charged when they have arrived, never when they are announced. A charge that holds
//! bytes never waits for more: it is refused, and its owner drops it. So no two messages wait for
//! each other. The messages of a stream wait for room before they hold any ([`BudgetShare::room_for`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_types::{Bytes, Failure, Reason};
use tokio::sync::Notify;
use tokio::time::Instant;

/// The part of the budget that one connection may hold, as a divisor: 12.5%.
const SHARE_OF_CONNECTION: u64 = 8;
/// The size of a request that finds room on a server that is not locked out.
const SMALL_REQUEST: u64 = 64 << 10;
/// Time without room for a small request after which the server is not ready.
pub(crate) const LOCKED_OUT_AFTER: Duration = Duration::from_secs(5);
/// The least bytes that an answer gives back of its request's charge: fewer are not worth two
/// atomic operations.
const SHRINK_MIN: u64 = 64 << 10;

/// Bytes that all connections together may hold.
#[derive(Debug, Clone)]
pub(crate) struct Budget(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    capacity: u64,
    /// The most that one connection may hold in several messages.
    share_max: u64,
    used: AtomicU64,
    /// Messages that wait for `freed`.
    waiting: AtomicUsize,
    freed: Notify,
    origin: Instant,
    /// Milliseconds from `origin` to when the room for a small request ended, plus 1; 0 while there
    /// is room.
    full_since: AtomicU64,
}

/// One connection's bytes of a budget. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct BudgetShare(Arc<Share>);

#[derive(Debug)]
struct Share {
    budget: Budget,
    used: AtomicU64,
}

/// Bytes held by one message or answer. Dropping the charge gives the bytes back.
#[derive(Debug)]
pub(crate) struct Charge {
    share: BudgetShare,
    bytes: u64,
}

impl Budget {
    /// A budget of `capacity` for messages of up to `message_max`. Holds at least one of those.
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

    /// Bytes held now.
    pub(crate) fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// The share of a new connection.
    pub(crate) fn share(&self) -> BudgetShare {
        BudgetShare(Arc::new(Share { budget: self.clone(), used: AtomicU64::new(0) }))
    }

    /// Whether there has been no room for a small request for [`LOCKED_OUT_AFTER`].
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
        // SeqCst, here and in `room_for`: a waiter that does not see these bytes free has counted
        // itself before this looks.
        let used = self.used.fetch_sub(bytes, Ordering::SeqCst) - bytes;
        if self.full_since.load(Ordering::Relaxed) != 0 && self.has_room(used) {
            self.full_since.store(0, Ordering::Relaxed);
        }
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.freed.notify_waiters();
        }
    }

    /// The time since the first call that found no room, without room at any call in between.
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
    /// Takes `bytes`, or refuses with `BYTE_BUDGET_EXCEEDED`.
    pub(crate) fn try_take(&self, bytes: u64) -> Result<Charge, Failure> {
        let mut charge = Charge { share: self.clone(), bytes: 0 };
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Counts `bytes` that are in memory already, whether there is room or not.
    pub(crate) fn take_held(&self, bytes: u64) -> Charge {
        self.0.used.fetch_add(bytes, Ordering::Relaxed);
        self.0.budget.0.used.fetch_add(bytes, Ordering::Relaxed);
        Charge { share: self.clone(), bytes }
    }

    /// Ends once `bytes` would find room. They are not taken: another may take them first. The
    /// caller holds nothing of the budget meanwhile. Never ends for more than a message may have.
    pub(crate) async fn room_for(self, bytes: u64) {
        let pool = &self.0.budget.0;
        let _waiting = Waiting::new(pool);
        loop {
            let mut freed = std::pin::pin!(pool.freed.notified());
            // Registered before looking, so that what is freed in between is not missed.
            freed.as_mut().enable();
            if self.has_room_for(bytes) {
                return;
            }
            freed.await;
        }
    }

    /// Whether `bytes` would find room now.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        let Share { budget: Budget(pool), used } = &*self.0;
        let of_connection = used.load(Ordering::SeqCst);
        let fits = of_connection == 0 || of_connection.saturating_add(bytes) <= pool.share_max;
        fits && pool.used.load(Ordering::SeqCst).saturating_add(bytes) <= pool.capacity
    }

    /// Takes `more` bytes for a charge that has `own` already.
    fn reserve(&self, own: u64, more: u64) -> Result<(), Failure> {
        let Share { budget: Budget(pool), used } = &*self.0;
        // The only message of its connection may be as large as a message may be.
        let fits = |used: u64| {
            let sum = used.saturating_add(more);
            (used == own || sum <= pool.share_max).then_some(sum)
        };
        if used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return Err(Failure::new(
                Reason::ByteBudgetExceeded,
                format!(
                    "{more} more bytes would pass the {} that one connection may hold: try again when some \
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
                "{more} more bytes would pass the {} that requests in flight may hold: try again when some \
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

/// Counts a message that waits while it lives.
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

impl Charge {
    /// Takes `more` bytes on top, or refuses with `BYTE_BUDGET_EXCEEDED`.
    pub(crate) fn grow(&mut self, more: u64) -> Result<(), Failure> {
        if more > 0 {
            self.share.reserve(self.bytes, more)?;
            self.bytes += more;
        }
        Ok(())
    }

    /// Makes the charge of a request that of its answer of `bytes`. Refused when the answer is larger
    /// and finds no room: the request was carried out then.
    pub(crate) fn answer(&mut self, bytes: u64) -> Result<(), Failure> {
        if bytes > self.bytes {
            return self.grow(bytes - self.bytes).map_err(Failure::after_execution);
        }
        self.settle(bytes);
        Ok(())
    }

    /// Makes the charge that of `bytes` which are in memory already, whether there is room or not.
    pub(crate) fn settle(&mut self, bytes: u64) {
        if bytes > self.bytes {
            self.merge(self.share.take_held(bytes - self.bytes));
        } else if self.bytes - bytes >= SHRINK_MIN {
            drop(self.split(self.bytes - bytes));
        }
    }

    /// A charge of its own for `bytes` of this one's; those that this one lacks are in memory
    /// already and counted now.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        if bytes > self.bytes {
            self.merge(self.share.take_held(bytes - self.bytes));
        }
        self.bytes -= bytes;
        Self { share: self.share.clone(), bytes }
    }

    /// Adds another charge of the same connection to this one.
    pub(crate) fn merge(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.share.release(self.bytes);
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
    use proptest::prelude::*;

    use super::*;

    fn budget(capacity: u64, message_max: u64) -> Budget {
        Budget::new(Bytes(capacity), Bytes(message_max))
    }

    #[test]
    fn bytes_beyond_the_budget_are_refused_and_dropped_charges_free_theirs() {
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
    fn a_connection_holds_one_message_of_any_size_or_its_share() {
        let budget = budget(1000, 100);
        let connection = budget.share();
        let held = connection.try_take(100).unwrap();
        let refused = connection.try_take(26).unwrap_err();
        assert!(refused.message.contains("one connection") && refused.retryable, "{refused}");
        let small = connection.try_take(25).unwrap();
        assert_eq!(budget.used(), 125);
        let other = budget.share().try_take(100).unwrap();
        drop((held, small, other));
        // Its only message may grow beyond its share, by what is made of the bytes that arrived.
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
        assert_eq!(budget.used(), 0, "waiting takes nothing");
    }

    #[test]
    fn an_answer_takes_the_place_of_its_request() {
        let budget = budget(1 << 20, 1 << 20);
        let connection = budget.share();
        let mut charge = connection.try_take(1000).unwrap();
        charge.answer(3000).unwrap();
        assert_eq!(budget.used(), 3000);
        let refused = charge.answer(2 << 20).unwrap_err();
        assert!(refused.retryable && refused.may_have_executed);
        charge.answer(1 << 20).unwrap();
        charge.answer(10).unwrap();
        assert_eq!(budget.used(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_without_room_for_seconds_is_locked_out_until_bytes_are_freed() {
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
        assert!(!budget.is_locked_out(), "room in between starts the time again");
        tokio::time::advance(LOCKED_OUT_AFTER).await;
        assert!(budget.is_locked_out());
    }

    proptest! {
        /// After any sequence of operations the budget has the sum of all charges.
        #[test]
        fn a_budget_is_the_sum_of_its_charges(
            steps in proptest::collection::vec((0u8..6, 0usize..4, 0u64..2000), 0..60),
        ) {
            let budget = budget(4000, 1000);
            let connections = [budget.share(), budget.share()];
            let mut charges: [Vec<Charge>; 2] = [Vec::new(), Vec::new()];
            for (step, at, bytes) in steps {
                let held = &mut charges[at % 2];
                let last = held.len().checked_sub(1);
                match (step, last) {
                    (0, _) => held.extend(connections[at % 2].try_take(bytes)),
                    (1, Some(last)) => drop(held[last].grow(bytes)),
                    (2, Some(last)) => drop(held[last].answer(bytes)),
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
