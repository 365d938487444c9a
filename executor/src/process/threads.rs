//! The copy threads and their queues.

use std::sync::Arc;

use millrace_device::Device as _;
use millrace_engine::Engine;

use crate::copies::copy_thread::{self, CopyWork};
use crate::error::Error;
use crate::memory::executor_state::ExecutorState;
use crate::process::control::ControlThread;
use crate::queue::WorkQueue;
use crate::thread::spawn;

/// The queues of the copy threads. Dropping this value closes the queues, so each thread ends after the
/// current work.
pub(super) struct WorkQueues<E: Engine> {
    copies: Arc<WorkQueue<CopyWork<E>>>,
    copies_out: Arc<WorkQueue<CopyWork<E>>>,
}

impl<E: Engine> WorkQueues<E> {
    pub(super) fn start(shared: &Arc<ExecutorState<E>>, control: &ControlThread<E>) -> Result<Self, Error> {
        let threads = Self { copies: control.copies(), copies_out: control.copies_out() };
        for (name, queue) in [("copies", control.copies()), ("copies out", control.copies_out())] {
            let shared = Arc::clone(shared);
            let stream = shared.device().stream()?;
            spawn(name, move || copy_thread::serve(&shared, &queue, stream))?;
        }
        Ok(threads)
    }
}

impl<E: Engine> Drop for WorkQueues<E> {
    fn drop(&mut self) {
        self.copies.close();
        self.copies_out.close();
    }
}
