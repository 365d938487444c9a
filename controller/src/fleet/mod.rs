//! The workers that are attached to this controller: their streams, what they last said, and how
//! to call them. All of it in memory: a new leader hears it from the workers themselves.
//!
//! | module | holds |
//! |---|---|
//! | [`control`] | the service workers attach to |
//! | [`desired`] | what every worker should serve, from the state |
//! | [`load`] | what routing reads of telemetry |
//! | [`readiness`] | whether a function can serve |
//! | [`session`] | one worker's stream |
//! | [`worker`] | one attached worker as others see it |

pub(crate) mod control;
pub(crate) mod desired;
mod load;
pub(crate) mod readiness;
mod session;
pub(crate) mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::{Failure, NodeName, Reason};
use tokio::sync::{Mutex, watch};

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
    /// Held while a worker is checked, registered and taken in.
    entering: Arc<Mutex<()>>,
}

impl Fleet {
    pub(crate) fn new() -> Self {
        Self {
            workers: watch::Sender::default(),
            changes: watch::Sender::default(),
            entering: Arc::default(),
        }
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

    /// Refuses a name that another live process holds. The same process may come again: its old
    /// stream is about to be noticed as broken.
    fn check_name(&self, name: &NodeName, instance: &str) -> Result<(), Failure> {
        match self.worker(name) {
            Some(holder) if holder.instance != instance => Err(Failure::new(
                Reason::NodeNameTaken,
                format!(
                    "a live worker is named {name} already: give this one another name, or stop the other"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Takes a registered worker in, in place of what had its name under an older epoch.
    fn attach(&self, worker: Arc<Worker>) {
        self.workers.send_modify(|workers| {
            let workers = Arc::make_mut(workers);
            if let Some(older) = workers.insert(worker.name.clone(), worker) {
                older.lost.cancel();
            }
        });
        self.changed();
    }

    /// Lets a worker go, at once: no request is sent to it from here on.
    fn detach(&self, worker: &Worker) {
        worker.lost.cancel();
        let gone = self.workers.send_if_modified(|workers| {
            let current = workers.get(&worker.name).is_some_and(|it| it.epoch == worker.epoch);
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
