//! The gate of host memory: counts the requests that use each model, so that no model is evicted that a
//! request needs, and lets requests wait for models that are only on the disk (a cold start).
//!
//! ```text
//!  requests ── enter ─► here: counted, at once    host tier ── record_loaded, try_evict, refuse ─► gate
//!                 └───► away: counted, wakes the tier, waits ◄── record_loaded
//! ```
//! A waiting request counts as a user of its model, so that the model is still in host memory when the
//! request continues. At most [`WAITING_MAX`] requests wait, each for no longer than its own timeout.
//! Requests on any thread and the host tier's task share the gate under a lock that is never held across
//! a wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_types::{Digest, Failure, Reason, Timestamp};
use tokio::sync::{Notify, watch};

use crate::clock::Clock;

/// Maximum number of requests of a worker that wait for models to be loaded into host memory.
pub const WAITING_MAX: usize = 1024;

/// The gate of host memory. Clones share the gate.
#[derive(Clone)]
pub struct HostMemoryGate(Arc<Inner>);

struct Inner {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Notifies waiting requests that the state of a model changed.
    changes: watch::Sender<()>,
    /// Notifies the host tier that the gate has work for it.
    wanted: Notify,
}

#[derive(Default)]
struct State {
    models: BTreeMap<Digest, ModelUse>,
    waiting: usize,
    /// The model to prewarm, until the host tier has taken the hint.
    hinted: Option<Digest>,
    /// Whether the host tier waits for a model to become idle.
    room_wanted: bool,
    closed: bool,
}

struct ModelUse {
    /// The number of requests that use or await the model.
    users: u32,
    last_used: Timestamp,
    place: ModelPresence,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ModelPresence {
    /// The model is in host memory.
    Here,
    /// The model is only on the disk.
    Away,
    /// The model cannot be loaded, for this reason.
    Refused(String),
    /// The worker no longer serves the model. The entry is removed with its last user.
    Gone,
}

/// The outcome of a prewarming hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HintOutcome {
    /// The model is in host memory.
    Here,
    /// The host tier was asked to load the model, unless it has other models to load.
    Asked,
    /// The hint was ignored: requests or another hint wait for models, the model cannot be loaded, or the
    /// gate is closed.
    Busy,
}

/// A request's reservation of a model in host memory, released when dropped.
pub struct HostPermit {
    gate: HostMemoryGate,
    digest: Digest,
    waited: Duration,
}

impl HostMemoryGate {
    /// Returns a gate without models.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let changes = watch::Sender::new(());
        Self(Arc::new(Inner { clock, state: Mutex::default(), changes, wanted: Notify::new() }))
    }

    /// Reserves a model in host memory, and waits while the model is only on the disk.
    ///
    /// # Errors
    /// [`Reason::FunctionNotReady`] for a model that this worker does not serve or cannot load;
    /// [`Reason::QueueFull`] if [`WAITING_MAX`] requests wait already; [`Reason::TimedOut`] after
    /// `timeout`; [`Reason::ShuttingDown`] once the gate is closed.
    pub async fn enter(&self, digest: Digest, timeout: Duration) -> Result<HostPermit, Failure> {
        let Some(waits) = self.begin(digest)? else {
            return Ok(HostPermit { gate: self.clone(), digest, waited: Duration::ZERO });
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
                    format!("the model was not loaded from the disk within {timeout:?}: allow more time");
                Err(Failure::new(Reason::TimedOut, message))
            }
        }
    }

    /// Counts a request as a user of a model. Returns the wait, or `None` if the model is in host memory.
    fn begin(&self, digest: Digest) -> Result<Option<ModelWait>, Failure> {
        let mut state = self.state();
        if state.closed {
            return Err(shutting_down());
        }
        let waiting = state.waiting;
        let entry = state.models.get_mut(&digest).ok_or_else(gone)?;
        match &entry.place {
            ModelPresence::Refused(why) => return Err(Failure::new(Reason::FunctionNotReady, why.clone())),
            ModelPresence::Gone => return Err(gone()),
            ModelPresence::Here => {
                entry.users += 1;
                return Ok(None);
            }
            ModelPresence::Away if waiting >= WAITING_MAX => {
                let message =
                    format!("{WAITING_MAX} requests wait for models from this worker's disk: try again soon");
                return Err(Failure::new(Reason::QueueFull, message));
            }
            ModelPresence::Away => entry.users += 1,
        }
        state.waiting += 1;
        drop(state);
        self.0.wanted.notify_one();
        let held = HostPermit { gate: self.clone(), digest, waited: Duration::ZERO };
        Ok(Some(ModelWait { changes: self.0.changes.subscribe(), held: Some(held), gate: self.clone() }))
    }

    /// Asks the host tier to prewarm a model, for which no request waits.
    pub fn hint(&self, digest: Digest) -> HintOutcome {
        let mut state = self.state();
        let busy = state.closed || state.waiting > 0 || state.hinted.is_some();
        let is_away = match state.models.get(&digest).map(|entry| &entry.place) {
            Some(ModelPresence::Here) => return HintOutcome::Here,
            place => place == Some(&ModelPresence::Away),
        };
        if busy || !is_away {
            return HintOutcome::Busy;
        }
        state.hinted = Some(digest);
        drop(state);
        self.0.wanted.notify_one();
        HintOutcome::Asked
    }

    /// Removes and returns the prewarming hint.
    pub(super) fn take_hint(&self) -> Option<Digest> {
        self.state().hinted.take()
    }

    /// Ends every wait, and refuses all later requests.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed();
    }

    /// Waits until the host tier has work: a request waits for a model on the disk, a hint was given, or
    /// room is needed and a model has become idle.
    pub(super) async fn wanted(&self) {
        self.0.wanted.notified().await;
    }

    /// Returns the models on the disk that requests wait for.
    pub(super) fn awaited_models(&self) -> Vec<Digest> {
        let asked = |entry: &ModelUse| entry.place == ModelPresence::Away && entry.users > 0;
        self.state().models.iter().filter(|(_, entry)| asked(entry)).map(|(&digest, _)| digest).collect()
    }

    /// Returns the idle models in host memory, with the time of their last use. From now on
    /// [`Self::wanted`] also reports the next model that becomes idle, because the caller looks for room.
    pub(super) fn idle_models(&self) -> Vec<(Timestamp, Digest)> {
        let mut state = self.state();
        state.room_wanted = true;
        let unused = |entry: &ModelUse| entry.place == ModelPresence::Here && entry.users == 0;
        let unused = state.models.iter().filter(|(_, entry)| unused(entry));
        unused.map(|(&digest, entry)| (entry.last_used, digest)).collect()
    }

    /// Records that a model is in host memory. Returns whether this is a cold start: the model had been
    /// evicted, and a request waits for it.
    pub(crate) fn record_loaded(&self, digest: Digest) -> bool {
        let now = self.0.clock.now();
        let mut state = self.state();
        let new = || ModelUse { users: 0, last_used: now, place: ModelPresence::Here };
        let entry = state.models.entry(digest).or_insert_with(new);
        let cold = entry.place == ModelPresence::Away && entry.users > 0;
        entry.place = ModelPresence::Here;
        entry.last_used = now;
        drop(state);
        self.changed();
        cold
    }

    /// Evicts a model, unless a request uses it. Returns whether the model was evicted. Later requests for
    /// the model wait.
    pub(super) fn try_evict(&self, digest: Digest) -> bool {
        let mut state = self.state();
        let Some(entry) = state.models.get_mut(&digest) else { return false };
        let leaves = entry.users == 0 && entry.place == ModelPresence::Here;
        if leaves {
            entry.place = ModelPresence::Away;
        }
        leaves
    }

    /// Records that a model cannot be loaded, and fails the waiting requests with this reason.
    pub(super) fn refuse(&self, digest: Digest, why: String) {
        if let Some(entry) = self.state().models.get_mut(&digest) {
            entry.place = ModelPresence::Refused(why);
        }
        self.changed();
    }

    /// Records that this worker no longer serves a model, and fails the requests that wait for the model.
    pub(super) fn forget(&self, digest: Digest) {
        let mut state = self.state();
        match state.models.get_mut(&digest) {
            Some(entry) if entry.users > 0 => entry.place = ModelPresence::Gone,
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
        if entry.place == ModelPresence::Gone {
            state.models.remove(&digest);
        }
        if std::mem::take(&mut state.room_wanted) {
            drop(state);
            self.0.wanted.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent whenever the lock is released, so a poisoned lock is still usable.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for HostMemoryGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostMemoryGate").field("models", &self.state().models.len()).finish_non_exhaustive()
    }
}

impl HostPermit {
    /// Returns the time that the request waited for the model; zero if the model was in host memory.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Drop for HostPermit {
    fn drop(&mut self) {
        self.gate.leave(self.digest);
    }
}

/// A request that waits for a model. Dropping the value ends the wait.
struct ModelWait {
    changes: watch::Receiver<()>,
    held: Option<HostPermit>,
    gate: HostMemoryGate,
}

impl ModelWait {
    async fn until_here(mut self) -> Result<HostPermit, Failure> {
        loop {
            self.changes.mark_unchanged();
            if let Some(outcome) = self.look() {
                return outcome;
            }
            // `self.gate` keeps the sender alive, so this error does not occur.
            if self.changes.changed().await.is_err() {
                return Err(shutting_down());
            }
        }
    }

    fn look(&mut self) -> Option<Result<HostPermit, Failure>> {
        let state = self.gate.state();
        if state.closed {
            return Some(Err(shutting_down()));
        }
        let digest = self.held.as_ref()?.digest;
        match state.models.get(&digest).map(|entry| &entry.place) {
            Some(ModelPresence::Away) => None,
            Some(ModelPresence::Here) => {
                drop(state);
                self.held.take().map(Ok)
            }
            Some(ModelPresence::Refused(why)) => {
                Some(Err(Failure::new(Reason::FunctionNotReady, why.clone())))
            }
            Some(ModelPresence::Gone) | None => Some(Err(gone())),
        }
    }
}

impl Drop for ModelWait {
    fn drop(&mut self) {
        self.gate.state().waiting -= 1;
    }
}

fn gone() -> Failure {
    Failure::new(Reason::FunctionNotReady, "this worker no longer serves the model: try again soon")
}

fn shutting_down() -> Failure {
    Failure::new(Reason::ShuttingDown, "the worker is shutting down: send to another worker")
}

#[cfg(test)]
mod tests;
