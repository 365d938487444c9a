//! Threads for long work on a single message: decompression, compression, and the conversion of large
//! JSON. The threads have a low priority, so that a large message delays small ones as little as the
//! operating system can arrange.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;

use millrace_transport::low_priority_runtime;
use millrace_types::{Failure, Reason};
use tokio::runtime::Runtime;
use tokio_util::task::AbortOnDropHandle;

/// Maximum number of threads. There is one thread for every two processors, up to this number.
const THREADS_MAX: usize = 4;

/// The threads. Clones share the threads, and dropping the last clone ends the threads.
#[derive(Clone)]
pub(crate) struct BulkThreads(Arc<OwnedRuntime>);

struct OwnedRuntime(Option<Runtime>);

impl BulkThreads {
    /// Starts the threads.
    ///
    /// # Errors
    /// Fails if the operating system cannot start the threads.
    pub(crate) fn start() -> io::Result<Self> {
        let threads = available_parallelism().map_or(1, NonZeroUsize::get).div_ceil(2).min(THREADS_MAX);
        let runtime = low_priority_runtime("bulk", threads)?;
        Ok(Self(Arc::new(OwnedRuntime(Some(runtime)))))
    }

    /// Runs `work` on one of the threads. Work that has not begun is dropped with the future.
    pub(crate) fn run<T, W>(&self, work: W) -> BulkWork<T>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let runtime = self.0.0.as_ref().expect("the runtime exists until the drop");
        AbortOnDropHandle::new(runtime.spawn(async move { work() }))
    }
}

/// A handle to work on one of the threads.
pub(crate) type BulkWork<T> = AbortOnDropHandle<T>;

/// Returns the failure for work that panicked or was aborted.
pub(crate) fn unfinished(error: &dyn fmt::Display) -> Failure {
    Failure::new(Reason::Internal, format!("cannot convert a large message: {error}"))
}

impl Drop for OwnedRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // A background shutdown, because the drop may happen within a runtime, where blocking is
            // not allowed.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn bulk_work_has_a_low_priority_and_other_threads_keep_theirs() {
        let threads = BulkThreads::start().unwrap();
        let before = getpriority_process(None).unwrap();
        let there = threads.run(|| getpriority_process(None).unwrap()).await.unwrap();
        assert_eq!(there, before.max(10));
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
