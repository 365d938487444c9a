//! Threads for long work on one message: decompression, compression, and the conversion of large JSON.
//! They have a low priority, so that a large message delays small ones as little as the operating system
//! can arrange.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;

use millrace_transport::low_priority_runtime;
use millrace_types::{Failure, Reason};
use tokio::runtime::Runtime;
use tokio_util::task::AbortOnDropHandle;

/// Most threads. There is one for two processors.
const THREADS_MAX: usize = 4;

/// The threads. Cloning shares them; they end with the last clone.
#[derive(Clone)]
pub(crate) struct BulkThreads(Arc<OwnedRuntime>);

struct OwnedRuntime(Option<Runtime>);

impl BulkThreads {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the operating system gives no threads.
    pub(crate) fn start() -> io::Result<Self> {
        let threads = available_parallelism().map_or(1, NonZeroUsize::get).div_ceil(2).min(THREADS_MAX);
        let runtime = low_priority_runtime("bulk", threads)?;
        Ok(Self(Arc::new(OwnedRuntime(Some(runtime)))))
    }

    /// Does `work` in one of the threads. Work that has not begun is dropped with the future.
    pub(crate) fn run<T, W>(&self, work: W) -> BulkWork<T>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let runtime = self.0.0.as_ref().expect("it is there until this is dropped");
        AbortOnDropHandle::new(runtime.spawn(async move { work() }))
    }
}

/// Work under way in one of the threads.
pub(crate) type BulkWork<T> = AbortOnDropHandle<T>;

/// The failure of work that did not return.
pub(crate) fn unfinished(error: &dyn fmt::Display) -> Failure {
    Failure::new(Reason::Internal, format!("cannot convert a large message: {error}"))
}

impl Drop for OwnedRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // May be dropped within a runtime, where nothing may be waited for.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn long_work_has_a_low_priority_and_other_threads_keep_theirs() {
        let threads = BulkThreads::start().unwrap();
        let before = getpriority_process(None).unwrap();
        let there = threads.run(|| getpriority_process(None).unwrap()).await.unwrap();
        assert_eq!(there, before.max(10));
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
