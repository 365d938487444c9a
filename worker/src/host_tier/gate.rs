//! Who uses which model in host memory: counted, so that none leaves that a request needs, and where a
//! request waits for one that is on the disk (a cold start).
//!
//! ```text
//!  requests ── enter ─► here: counted, at once          host tier ── arrived, try_leave, refuse ─► gate
//!                 └───► away: counted, wakes the tier, waits ◄── arrived
//! ```
//! A request that waits counts as one that uses, so that what came for it is still there when it goes
//! on. At most [`WAITING_MAX`] wait, each no longer than its own timeout. Shared by requests on any
//! thread and the host tier's task: a lock, never held across a wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_types::{Digest, Failure, Reason, Timestamp};
use tokio::sync::{Notify, watch};

use crate::clock::Clock;

/// Requests that wait for models to come into host memory, on one worker.
pub const WAITING_MAX: usize = 1024;

/// The gate. Clones are the same.
#[derive(Clone)]
pub struct Gate(Arc<Inner>);

struct Inner {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Something that those who wait look at is different.
    changes: watch::Sender<()>,
    /// The host tier is to look.
    wanted: Notify,
}

#[derive(Default)]
struct State {
    models: BTreeMap<Digest, Entry>,
    waiting: usize,
    /// The model that is likely to be asked for, until the host tier has heard of it.
    hinted: Option<Digest>,
    /// Whether the host tier wants to hear when a model is not used any more.
    room_wanted: bool,
    closed: bool,
}

struct Entry {
    /// Requests that use it, or wait for it.
    users: u32,
    last_used: Timestamp,
    place: Place,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// In host memory.
    Here,
    /// On the disk.
    Away,
    /// It cannot come, and why.
    Refused(String),
    /// It is not served here any more, and goes with its last user.
    Gone,
}

/// What became of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hinted {
    /// The model is in host memory.
    Here,
    /// The host tier was asked to bring it, if it has nothing else to bring.
    Asked,
    /// Nobody was asked: requests wait for models, or another hint does.
    Busy,
}

/// A request's hold on a model in host memory, until it is dropped.
pub struct Held {
    gate: Gate,
    digest: Digest,
    waited: Duration,
}

impl Gate {
    /// Nothing is here.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let changes = watch::Sender::new(());
        Self(Arc::new(Inner { clock, state: Mutex::default(), changes, wanted: Notify::new() }))
    }

    /// Holds a model, once it is in host memory: at once where it is there.
    ///
    /// # Errors
    /// [`Reason::FunctionNotReady`] for a model that is not served here, or that cannot come;
    /// [`Reason::QueueFull`] where [`WAITING_MAX`] wait; [`Reason::TimedOut`] after `timeout`;
    /// [`Reason::ShuttingDown`] once the gate is closed.
    pub async fn enter(&self, digest: Digest, timeout: Duration) -> Result<Held, Failure> {
        let Some(waits) = self.begin(digest)? else {
            return Ok(Held { gate: self.clone(), digest, waited: Duration::ZERO });
        };
        let began = self.0.clock.now();
        match tokio::time::timeout(self.0.clock.sleep_for(timeout), waits.until_here()).await {
            Ok(Ok(mut held)) => {
                held.waited = self.0.clock.now().since(began);
                Ok(held)
            }
            Ok(Err(failure)) => Err(failure),
            Err(_elapsed) => {
                let message =
                    format!("its model did not come from the disk within {timeout:?}: allow more time");
                Err(Failure::new(Reason::TimedOut, message))
            }
        }
    }

    /// Counts a request. `None`: its model is here.
    fn begin(&self, digest: Digest) -> Result<Option<Waiting>, Failure> {
        let mut state = self.state();
        if state.closed {
            return Err(shutting_down());
        }
        let waiting = state.waiting;
        let entry = state.models.get_mut(&digest).ok_or_else(gone)?;
        match &entry.place {
            Place::Refused(why) => return Err(Failure::new(Reason::FunctionNotReady, why.clone())),
            Place::Gone => return Err(gone()),
            Place::Here => {
                entry.users += 1;
                return Ok(None);
            }
            Place::Away if waiting >= WAITING_MAX => {
                let message =
                    format!("{WAITING_MAX} requests wait for models from this worker's disk: try again soon");
                return Err(Failure::new(Reason::QueueFull, message));
            }
            Place::Away => entry.users += 1,
        }
        state.waiting += 1;
        drop(state);
        self.0.wanted.notify_one();
        let held = Held { gate: self.clone(), digest, waited: Duration::ZERO };
        Ok(Some(Waiting { changes: self.0.changes.subscribe(), held: Some(held), gate: self.clone() }))
    }

    /// A model is likely to be asked for. Nobody waits for it.
    pub fn hint(&self, digest: Digest) -> Hinted {
        let mut state = self.state();
        let busy = state.closed || state.waiting > 0 || state.hinted.is_some();
        let is_away = match state.models.get(&digest).map(|entry| &entry.place) {
            Some(Place::Here) => return Hinted::Here,
            place => place == Some(&Place::Away),
        };
        if busy || !is_away {
            return Hinted::Busy;
        }
        state.hinted = Some(digest);
        drop(state);
        self.0.wanted.notify_one();
        Hinted::Asked
    }

    /// The model that is likely to be asked for, once.
    pub(super) fn take_hint(&self) -> Option<Digest> {
        self.state().hinted.take()
    }

    /// Ends every wait; nobody enters any more.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed();
    }

    /// Returns when the host tier is to look: a request waits for a model that is away, one is likely to
    /// be asked for, or room was wanted and a model is not used any more.
    pub(super) async fn wanted(&self) {
        self.0.wanted.notified().await;
    }

    /// The models that are away and that requests wait for.
    pub(super) fn asked(&self) -> Vec<Digest> {
        let asked = |entry: &Entry| entry.place == Place::Away && entry.users > 0;
        self.state().models.iter().filter(|(_, entry)| asked(entry)).map(|(&digest, _)| digest).collect()
    }

    /// The models that are here and that no request uses, and when one last did. From here on the host
    /// tier hears of others that come to be so, if it wants room.
    pub(super) fn unused(&self) -> Vec<(Timestamp, Digest)> {
        let mut state = self.state();
        state.room_wanted = true;
        let unused = |entry: &Entry| entry.place == Place::Here && entry.users == 0;
        let unused = state.models.iter().filter(|(_, entry)| unused(entry));
        unused.map(|(&digest, entry)| (entry.last_used, digest)).collect()
    }

    /// A model is here. Says whether it had left before and a request waits for it: whether this is a
    /// cold start.
    pub(crate) fn arrived(&self, digest: Digest) -> bool {
        let now = self.0.clock.now();
        let mut state = self.state();
        let new = || Entry { users: 0, last_used: now, place: Place::Here };
        let entry = state.models.entry(digest).or_insert_with(new);
        let cold = entry.place == Place::Away && entry.users > 0;
        (entry.place, entry.last_used) = (Place::Here, now);
        drop(state);
        self.changed();
        cold
    }

    /// Has a model leave, unless a request uses it. Whoever asks from here on waits.
    pub(super) fn try_leave(&self, digest: Digest) -> bool {
        let mut state = self.state();
        let Some(entry) = state.models.get_mut(&digest) else { return false };
        let leaves = entry.users == 0 && entry.place == Place::Here;
        if leaves {
            entry.place = Place::Away;
        }
        leaves
    }

    /// A model cannot come: whoever waits for it is told why.
    pub(super) fn refuse(&self, digest: Digest, why: String) {
        if let Some(entry) = self.state().models.get_mut(&digest) {
            entry.place = Place::Refused(why);
        }
        self.changed();
    }

    /// A model is not served here any more.
    pub(super) fn forget(&self, digest: Digest) {
        let mut state = self.state();
        match state.models.get_mut(&digest) {
            Some(entry) if entry.users > 0 => entry.place = Place::Gone,
            _ => {
                state.models.remove(&digest);
            }
        }
        drop(state);
        self.changed();
    }

    fn changed(&self) {
        self.0.changes.send_replace(());
    }

    fn leave(&self, digest: Digest) {
        let now = self.0.clock.now();
        let mut state = self.state();
        let Some(entry) = state.models.get_mut(&digest) else { return };
        entry.users -= 1;
        entry.last_used = now;
        if entry.users > 0 {
            return;
        }
        if entry.place == Place::Gone {
            state.models.remove(&digest);
        }
        if std::mem::take(&mut state.room_wanted) {
            drop(state);
            self.0.wanted.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // It is never left half-changed: a poisoned one is still good.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("models", &self.state().models.len()).finish_non_exhaustive()
    }
}

impl Held {
    /// How long the model took to come into host memory; zero where it was there.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.leave(self.digest);
    }
}

/// A request that waits. Dropped, it does no longer.
struct Waiting {
    changes: watch::Receiver<()>,
    held: Option<Held>,
    gate: Gate,
}

impl Waiting {
    async fn until_here(mut self) -> Result<Held, Failure> {
        loop {
            self.changes.mark_unchanged();
            if let Some(outcome) = self.look() {
                return outcome;
            }
            // The sender is the gate's own, which this has a hold on.
            if self.changes.changed().await.is_err() {
                return Err(shutting_down());
            }
        }
    }

    fn look(&mut self) -> Option<Result<Held, Failure>> {
        let state = self.gate.state();
        if state.closed {
            return Some(Err(shutting_down()));
        }
        let digest = self.held.as_ref()?.digest;
        match state.models.get(&digest).map(|entry| &entry.place) {
            Some(Place::Away) => None,
            Some(Place::Here) => {
                drop(state);
                self.held.take().map(Ok)
            }
            Some(Place::Refused(why)) => Some(Err(Failure::new(Reason::FunctionNotReady, why.clone()))),
            Some(Place::Gone) | None => Some(Err(gone())),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.gate.state().waiting -= 1;
    }
}

fn gone() -> Failure {
    Failure::new(Reason::FunctionNotReady, "the model is not on this worker any more: try again soon")
}

fn shutting_down() -> Failure {
    Failure::new(Reason::ShuttingDown, "the worker is shutting down: ask another")
}

#[cfg(test)]
mod tests;
