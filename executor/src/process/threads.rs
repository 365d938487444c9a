//! The copy and run threads, and their queues.

use std::sync::Arc;
use std::thread;

use millrace_device::Device as _;
use millrace_engine::{Engine, LaunchThreads};

use crate::copies::copy_thread::{self, CopyWork};
use crate::error::Error;
use crate::memory::executor_state::ExecutorState;
use crate::process::control::ControlThread;
use crate::queue::WorkQueue;
use crate::runs::run_thread::{self, QueuedRun};

/// The queues of the copy and run threads. Dropping this value closes the queues, so each thread ends
/// after the current work.
pub(super) struct WorkQueues<E: Engine> {
    copies: Arc<WorkQueue<CopyWork<E>>>,
    copies_out: Arc<WorkQueue<CopyWork<E>>>,
    runs: Arc<WorkQueue<QueuedRun<E>>>,
}

impl<E: Engine> WorkQueues<E> {
    pub(super) fn start(shared: &Arc<ExecutorState<E>>, control: &ControlThread<E>) -> Result<Self, Error> {
        let threads =
            Self { copies: control.copies(), copies_out: control.copies_out(), runs: control.runs() };
        for (name, queue) in [("copies", control.copies()), ("copies out", control.copies_out())] {
            let shared = Arc::clone(shared);
            let stream = shared.device().stream()?;
            spawn(name, move || copy_thread::serve(&shared, &queue, stream))?;
        }
        spawn("runs", {
            let shared = Arc::clone(shared);
            let queue = control.runs();
            let launches = shared.engine.queue(LaunchThreads::Whole)?;
            move || shared.engine.enter(launches, |launches| run_thread::serve(&shared, &queue, launches))
        })?;
        Ok(threads)
    }
}

impl<E: Engine> Drop for WorkQueues<E> {
    fn drop(&mut self) {
        self.copies.close();
        self.copies_out.close();
        self.runs.close();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
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
