//! Threads of the executor.

use std::thread;

use crate::error::Error;

/// Starts a thread, which ends with the process.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let body = move || {
        let _guard = AbortOnPanic;
        body();
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
    // Not joined, because the thread ends with the process.
    thread.map(drop).map_err(|source| Error::Os { what: "start a thread", source })
}

/// Aborts the process if a thread panics. Without that thread, the executor would answer only some
/// commands; the worker can start a new incarnation instead.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}
