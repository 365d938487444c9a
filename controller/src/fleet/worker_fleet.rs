//! All workers attached to this controller.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::{NodeName, Timestamp};
use tokio::sync::watch;
use tokio::time::Instant;

use super::worker::AttachedWorker;

/// The attached workers by name.
pub(crate) type Workers = Arc<BTreeMap<NodeName, Arc<AttachedWorker>>>;

/// All attached workers. Clones share the fleet.
#[derive(Debug, Clone)]
pub(crate) struct WorkerFleet {
    workers: watch::Sender<Workers>,
    /// The number of changes of attached workers and of function statuses. Telemetry does not count.
    changes: watch::Sender<u64>,
    /// The zero of this fleet's clock.
    began: Instant,
}

impl WorkerFleet {
    pub(crate) fn new() -> Self {
        Self { workers: watch::Sender::default(), changes: watch::Sender::default(), began: Instant::now() }
    }

    /// Returns the monotonic time by which leases are judged.
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.began.elapsed()
    }

    /// Returns the instant of a time of this fleet's clock.
    pub(super) fn instant(&self, at: Timestamp) -> Instant {
        self.began + at.since(Timestamp::ZERO)
    }

    /// Returns the attached workers.
    pub(crate) fn workers(&self) -> Workers {
        self.workers.borrow().clone()
    }

    /// Returns an attached worker.
    pub(crate) fn worker(&self, name: &NodeName) -> Option<Arc<AttachedWorker>> {
        self.workers.borrow().get(name).cloned()
    }

    /// Returns a watch that changes when a worker attaches or detaches, or a function's status on a
    /// worker changes.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the number of changes so far.
    pub(crate) fn version(&self) -> u64 {
        *self.changes.borrow()
    }

    /// Counts a change.
    pub(super) fn changed(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// Adds a registered worker. An older stream under the same name ends.
    pub(crate) fn attach(&self, worker: Arc<AttachedWorker>) {
        self.workers.send_modify(|workers| {
            let workers = Arc::make_mut(workers);
            if let Some(older) = workers.insert(worker.name.clone(), worker) {
                older.stream_ended.cancel();
            }
        });
        self.changed();
    }

    /// Removes a worker at once. The worker gets no further requests, and other workers may take over
    /// the running requests.
    pub(super) fn detach(&self, worker: &AttachedWorker) {
        worker.stream_ended.cancel();
        self.retire(worker);
    }

    /// Removes a worker from routing. The worker finishes its running requests.
    pub(super) fn retire(&self, worker: &AttachedWorker) {
        let gone = self.workers.send_if_modified(|workers| {
            // Compare streams, not epochs: the same process may attach again with the same epoch.
            let current = workers.get(&worker.name).is_some_and(|it| std::ptr::eq(Arc::as_ptr(it), worker));
            if current {
                Arc::make_mut(workers).remove(&worker.name);
            }
            current
        });
        if gone {
            self.changed();
        }
    }
}
