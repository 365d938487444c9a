//! A result that many ask for, made once for all who ask within an interval.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

/// Makes a result for everybody who asked before the work on it began. So it is never older than the
/// question, and one piece of work goes on at a time. Work begins at most once in an interval, so that questions
/// cost no more than that, however many there are.
#[derive(Debug)]
pub struct SharedResult<T> {
    every: Duration,
    /// Of the work that has not begun.
    next: Mutex<Arc<OnceLock<T>>>,
    /// Held while somebody works. When work may begin again.
    working: tokio::sync::Mutex<Option<Instant>>,
}

impl<T: Clone> SharedResult<T> {
    /// A result that is made at most once in this interval.
    #[must_use]
    pub fn every(every: Duration) -> Self {
        Self { every, next: Mutex::default(), working: tokio::sync::Mutex::default() }
    }

    /// The result of `work`, or that of another's, if it begins after this was called.
    pub async fn get<F: Future<Output = T>>(&self, work: impl FnOnce() -> F) -> T {
        let result = self.next().clone();
        // Questions that came together are all asked before the first is answered.
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
        // Nobody else sets it: `working` is held.
        result.get_or_init(|| done).clone()
    }

    fn next(&self) -> std::sync::MutexGuard<'_, Arc<OnceLock<T>>> {
        // A panic elsewhere leaves a whole value.
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures::future::join_all;

    use super::*;

    #[tokio::test]
    async fn questions_that_come_together_are_answered_by_one_piece_of_work() {
        let shared = SharedResult::every(Duration::ZERO);
        let works = AtomicU64::new(0);
        let ask = || shared.get(async || works.fetch_add(1, Ordering::Relaxed));
        assert_eq!(join_all((0..100).map(|_| ask())).await, [0; 100]);
        // A later question gets a later answer.
        assert_eq!(ask().await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn work_begins_once_in_an_interval() {
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
    async fn a_question_that_comes_during_the_work_is_answered_by_the_next() {
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
    async fn work_that_is_given_up_is_done_by_the_next_who_asked() {
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
