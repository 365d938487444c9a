//! The workers attached to this controller: streams, last reports, and clients for calls. All of this
//! is in memory: a new leader hears from the workers themselves.
//!
//! | module | task |
//! |---|---|
//! | [`control`] | the service to which workers attach |
//! | [`session`] | attaches a worker |
//! | [`registration`] | a worker's registration in the replicated state |
//! | [`hear`] | receives a worker's messages |
//! | [`checkpoints`] | commits a worker's soft state to the log |
//! | [`tell`] | sends updates to a worker |
//! | [`desired`] | the desired state of each worker |
//! | [`load`] | the part of telemetry that routing reads |
//! | [`readiness`] | whether a function can serve |
//! | [`worker`] | an attached worker |

mod checkpoints;
pub(crate) mod control;
pub(crate) mod desired;
mod hear;
mod load;
pub(crate) mod readiness;
pub(crate) mod registration;
mod session;
mod tell;
pub(crate) mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_types::{NodeName, Timestamp};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::raft::Replica;

pub(crate) use load::WorkerLoad;
pub(crate) use worker::{AttachedWorker, RevisionPhase};

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

    fn instant(&self, at: Timestamp) -> Instant {
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

    fn changed(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// Adds a registered worker. An older stream under the same name ends.
    pub(crate) fn attach(&self, worker: Arc<AttachedWorker>) {
        self.workers.send_modify(|workers| {
            let workers = Arc::make_mut(workers);
            if let Some(older) = workers.insert(worker.name.clone(), worker) {
                older.lost.cancel();
            }
        });
        self.changed();
    }

    /// Removes a worker at once. The worker gets no further requests, and other workers may take over
    /// the running requests.
    fn detach(&self, worker: &AttachedWorker) {
        worker.lost.cancel();
        self.retire(worker);
    }

    /// Removes a worker from routing. The worker finishes its running requests.
    fn retire(&self, worker: &AttachedWorker) {
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

    /// Updates the attached workers' registrations from the state, until stopped. A worker that is lost
    /// in the state gets no requests once this controller, too, has heard nothing for a `lease`. That
    /// may be later than the last change of the state.
    pub(crate) async fn follow_until(self, stop: CancellationToken, replica: Replica, lease: Duration) {
        let mut changes = replica.changes();
        let follow = async {
            let mut seen = 0;
            let mut look_at = None;
            loop {
                let silent = async {
                    match look_at {
                        Some(at) => tokio::time::sleep_until(self.instant(at)).await,
                        None => std::future::pending().await,
                    }
                };
                let due = tokio::select! {
                    changed = changes.changed() => match changed {
                        Ok(()) => false,
                        Err(_) => return,
                    },
                    () = silent => true,
                };
                let state = replica.state();
                let news = std::mem::replace(&mut seen, state.version()) != state.version();
                if news {
                    registration::follow(&self, &state);
                }
                if news || due {
                    look_at = registration::presume_lost(&self, &state, lease);
                }
            }
        };
        // The result is `None` after a stop; both cases end the task.
        stop.run_until_cancelled(follow).await;
    }
}
