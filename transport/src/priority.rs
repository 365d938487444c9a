//! Threads of low priority, for work that should delay other work as little as the operating system can
//! arrange.

use std::io;
use std::sync::OnceLock;

use rustix::process::setpriority_process;
use tokio::runtime::{Builder, Handle, Runtime};

/// The niceness of the threads: under contention each has a tenth of the share of another thread.
const NICENESS: i32 = 10;

/// Starts a runtime with this many threads of low priority.
///
/// # Errors
/// When the operating system gives no threads.
pub fn low_priority_runtime(name: &'static str, threads: usize) -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .on_thread_start(move || {
            if let Err(error) = setpriority_process(None, NICENESS) {
                tracing::debug!(%error, name, "a thread keeps its priority");
            }
        })
        .build()
}

/// The thread that serves the connections of distrusted addresses, for all ports of the process. `None`: the
/// operating system gave none. It starts when it is first needed and lives as long as the process.
pub(crate) fn distrusted() -> Option<&'static Handle> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let started = RUNTIME.get_or_init(|| match low_priority_runtime("distrusted", 1) {
        Ok(runtime) => Some(runtime),
        Err(error) => {
            tracing::warn!(%error, "connections of distrusted addresses keep their priority");
            None
        }
    });
    started.as_ref().map(Runtime::handle)
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn its_threads_have_a_low_priority_and_other_threads_keep_theirs() {
        let before = getpriority_process(None).unwrap();
        let there = distrusted().unwrap().spawn(async { getpriority_process(None).unwrap() }).await.unwrap();
        assert_eq!(there, NICENESS.max(before));
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
