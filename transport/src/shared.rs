//! A result that many callers request, computed once for all callers within an interval.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

/// Computes a result for all callers that asked before the computation began. The result is therefore
/// never older than the request, and a single computation runs at a time. Computations begin at most
/// once per interval, which bounds their cost for any number of callers.
#[derive(Debug)]
pub struct SharedResult<T> {
    every: Duration,
    /// Slot for the result of the next computation, which has not begun.
    next: Mutex<Arc<OnceLock<T>>>,
    /// Held during a computation. The value is the earliest time of the next computation.
    working: tokio::sync::Mutex<Option<Instant>>,
}

impl<T: Clone> SharedResult<T> {
    /// Creates a result that is computed at most once per interval.
    #[must_use]
    pub fn every(every: Duration) -> Self {
        Self { every, next: Mutex::default(), working: tokio::sync::Mutex::default() }
    }

    /// Returns the result of `work`, or of another caller's work that began after this call.
    pub async fn get<F: Future<Output = T>>(&self, work: impl FnOnce() -> F) -> T {
        let result = self.next().clone();
        // Lets concurrent callers register before the first computation begins.
        yield_now().await;
        let mut working = self.working.lock().await;
        if let Some(done) = result.get() {
            return done.clone();
        }
        if let Some(not_before) = *working {
            sleep_until(not_before).await;
        }
        *working = Some(Instant::now() + self.every);
        {
            let mut next = self.next();
            if Arc::ptr_eq(&next, &result) {
                *next = Arc::default();
            }
        }
        let done = work().await;
        // No other caller can set this slot, because `working` is locked.
        result.get_or_init(|| done).clone()
    }

    fn next(&self) -> std::sync::MutexGuard<'_, Arc<OnceLock<T>>> {
        // Ignores a poisoned lock: a panic elsewhere cannot leave the value half written.
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures::future::join_all;

    use super::*;

    #[tokio::test]
    async fn concurrent_requests_share_one_computation() {
        let shared = SharedResult::every(Duration::ZERO);
        let works = AtomicU64::new(0);
        let ask = || shared.get(async || works.fetch_add(1, Ordering::Relaxed));
        assert_eq!(join_all((0..100).map(|_| ask())).await, [0; 100]);
        // A later request gets a newer result.
        assert_eq!(ask().await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn computations_begin_at_most_once_per_interval() {
        let every = Duration::from_millis(100);
        let shared = SharedResult::every(every);
        let begun = Instant::now();
        for works in 0..10 {
            assert_eq!(shared.get(async || Instant::now()).await, begun + every * works);
        }
        tokio::time::advance(every * 5).await;
        let asked = Instant::now();
        assert_eq!(shared.get(async || Instant::now()).await, asked);
    }

    #[tokio::test]
    async fn a_request_during_a_computation_gets_the_next_result() {
        let shared = SharedResult::every(Duration::ZERO);
        let works = AtomicU64::new(0);
        let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
        let go_on = tokio::sync::Semaphore::new(0);
        let ask = || {
            shared.get(async || {
                begun.send(()).unwrap();
                go_on.acquire().await.unwrap().forget();
                works.fetch_add(1, Ordering::Relaxed)
            })
        };
        let first = ask();
        let second = async {
            has_begun.recv().await.unwrap();
            let second = ask();
            go_on.add_permits(2);
            second.await
        };
        assert_eq!(tokio::join!(first, second), (0, 1));
    }

    #[tokio::test]
    async fn a_cancelled_computation_is_repeated_by_the_next_caller() {
        let shared = SharedResult::every(Duration::ZERO);
        let mut given_up = Box::pin(shared.get(std::future::pending::<u64>));
        let mut waits = Box::pin(shared.get(async || 7));
        for _ in 0..3 {
            assert!(futures::poll!(given_up.as_mut()).is_pending());
            assert!(futures::poll!(waits.as_mut()).is_pending());
        }
        drop(given_up);
        assert_eq!(waits.await, 7);
    }
}
