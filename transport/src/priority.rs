//! Threads of low priority, for work that should delay other work as little as the operating system
//! can arrange.

use std::io;
use std::sync::OnceLock;

use rustix::process::setpriority_process;
use tokio::runtime::{Builder, Handle, Runtime};

/// Niceness of the threads. Under contention, a thread gets a tenth of the processor share of a
/// normal thread.
const NICENESS: i32 = 10;

/// Starts a runtime with `threads` threads of low priority.
///
/// # Errors
/// Fails if the operating system cannot start the threads.
pub fn low_priority_runtime(name: &'static str, threads: usize) -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .on_thread_start(move || {
            if let Err(error) = setpriority_process(None, NICENESS) {
                tracing::debug!(%error, name, "cannot lower the priority of a thread");
            }
        })
        .build()
}

/// Returns the runtime that serves the connections of distrusted addresses, for all ports of the
/// process. Returns `None` if the operating system could not start its thread. The runtime starts on
/// first use and lives as long as the process.
pub(crate) fn distrusted() -> Option<&'static Handle> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let started = RUNTIME.get_or_init(|| match low_priority_runtime("distrusted", 1) {
        Ok(runtime) => Some(runtime),
        Err(error) => {
            tracing::warn!(%error, "cannot start the low-priority thread: distrusted addresses are served at normal priority");
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
    async fn distrusted_runtime_has_a_low_priority_and_other_threads_keep_theirs() {
        let before = getpriority_process(None).unwrap();
        let there = distrusted().unwrap().spawn(async { getpriority_process(None).unwrap() }).await.unwrap();
        assert_eq!(there, NICENESS.max(before));
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
