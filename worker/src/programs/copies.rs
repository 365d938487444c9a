//! Copies of large data on blocking threads: on the actor thread a copy would hold up every request of
//! the worker. A bounded number of copies runs at a time, and further copies wait for their turn. The
//! watch of a process waits for a copy before it reads the process's next message, so that requests of
//! the process are answered in order.

use std::io;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// Maximum number of concurrent copies. Copies compete with requests for memory bandwidth, and more of them
/// would not finish sooner.
pub(super) const COPIES_MAX: usize = 4;

/// The permits of copies, which clones share.
#[derive(Debug, Clone)]
pub(crate) struct CopyPermits(Arc<Semaphore>);

impl Default for CopyPermits {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(COPIES_MAX)))
    }
}

impl CopyPermits {
    /// Runs a copy on a blocking thread. A copy that has begun runs to its end, even if the caller gives
    /// up.
    ///
    /// # Errors
    /// The copy's error, or the end of the runtime.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        copy: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let turn = Arc::clone(&self.0).acquire_owned().await.map_err(io::Error::other)?;
        let made = spawn_blocking(move || {
            let made = copy();
            drop(turn);
            made
        });
        made.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
impl CopyPermits {
    /// Takes all permits: no copy begins until the returned permit is dropped.
    pub(super) async fn take_all(&self) -> tokio::sync::OwnedSemaphorePermit {
        Arc::clone(&self.0).acquire_many_owned(COPIES_MAX as u32).await.unwrap()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use futures::FutureExt as _;
    use futures::future::join_all;

    use super::*;

    #[tokio::test]
    async fn at_most_copies_max_copies_run_at_a_time_and_none_on_the_callers_thread() {
        let aside = CopyPermits::default();
        let (begin, begun) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        let copy = |number: usize| {
            let begin = begin.clone();
            let ended = Arc::clone(&ended);
            aside.run(move || {
                begin.send(number).unwrap();
                // Blocks until the test drops `end`.
                ended.lock().unwrap().recv().unwrap_or_default();
                Ok(number)
            })
        };
        let mut copies = Box::pin(join_all((0..COPIES_MAX + 3).map(copy)));
        // The poll returns although no copy has ended, so no copy runs on this thread.
        assert!(copies.as_mut().now_or_never().is_none());
        let mut first: Vec<usize> = begun.iter().take(COPIES_MAX).collect();
        first.sort_unstable();
        assert!(first.into_iter().eq(0..COPIES_MAX) && begun.try_recv().is_err());
        drop(end);
        let made: io::Result<Vec<usize>> = copies.await.into_iter().collect();
        assert!(made.unwrap().into_iter().eq(0..COPIES_MAX + 3));
    }
}
