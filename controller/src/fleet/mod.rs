//! The workers that are attached to this controller: their streams, what they last said, and how
//! to call them. All of it in memory: a new leader hears it from the workers themselves.
//!
//! | module | holds |
//! |---|---|
//! | [`control`] | the service workers attach to |
//! | [`session`] | a worker attaches |
//! | [`registration`] | its place in the replicated state |
//! | [`hear`] | what it says |
//! | [`checkpoints`] | its soft state on the way into the log |
//! | [`tell`] | what it is told |
//! | [`desired`] | what each worker should serve, from the state |
//! | [`load`] | what routing reads of telemetry |
//! | [`readiness`] | whether a function can serve |
//! | [`worker`] | one attached worker as others see it |

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

pub(crate) use load::Load;
pub(crate) use worker::{Phase, Worker};

/// The attached workers by name.
pub(crate) type Workers = Arc<BTreeMap<NodeName, Arc<Worker>>>;

/// Every attached worker. Cloning shares it.
#[derive(Debug, Clone)]
pub(crate) struct Fleet {
    workers: watch::Sender<Workers>,
    /// Counts changes of who is attached and of what is ready where. Telemetry does not count.
    changes: watch::Sender<u64>,
    /// The clock's zero.
    began: Instant,
}

impl Fleet {
    pub(crate) fn new() -> Self {
        Self { workers: watch::Sender::default(), changes: watch::Sender::default(), began: Instant::now() }
    }

    /// Monotonic time, which leases are judged by.
    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.began.elapsed()
    }

    fn instant(&self, at: Timestamp) -> Instant {
        self.began + at.since(Timestamp::ZERO)
    }

    /// The workers attached now.
    pub(crate) fn workers(&self) -> Workers {
        self.workers.borrow().clone()
    }

    /// One worker, if it is attached now.
    pub(crate) fn worker(&self, name: &NodeName) -> Option<Arc<Worker>> {
        self.workers.borrow().get(name).cloned()
    }

    /// Moves on when someone attached or went, or when a function's status changed on a worker.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The number of changes so far.
    pub(crate) fn version(&self) -> u64 {
        *self.changes.borrow()
    }

    fn changed(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// Takes a registered worker in, in place of what had its name on an older stream.
    pub(crate) fn attach(&self, worker: Arc<Worker>) {
        self.workers.send_modify(|workers| {
            let workers = Arc::make_mut(workers);
            if let Some(older) = workers.insert(worker.name.clone(), worker) {
                older.lost.cancel();
            }
        });
        self.changed();
    }

    /// Lets a worker go, at once: no request is sent to it from here on, and those under way may go
    /// to others.
    fn detach(&self, worker: &Worker) {
        worker.lost.cancel();
        self.retire(worker);
    }

    /// Sends no more requests to a worker. It finishes those it has.
    fn retire(&self, worker: &Worker) {
        let gone = self.workers.send_if_modified(|workers| {
            // By stream, not by epoch: the same process comes again under the epoch it has.
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

    /// Keeps the attached workers' registrations in line with the state, until stopped. One that the
    /// state has lost is sent no requests once it was silent here for a `lease`, too: that may be later,
    /// when nothing changes any more.
    pub(crate) async fn follow_until(self, stop: CancellationToken, replica: Replica, lease: Duration) {
        let mut changes = replica.changes();
        let follow = async {
            let (mut seen, mut look_at) = (0, None);
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
        // `None` when stopped: nothing is left to do either way.
        stop.run_until_cancelled(follow).await;
    }
}
