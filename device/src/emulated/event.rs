//! Events of an emulated GPU's streams.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use millrace_types::Timestamp;

use crate::api::Event;
use crate::clock::monotonic_now;
use crate::error::Error;

/// A point in the queue of an emulated stream.
#[derive(Debug, Clone)]
pub struct EmulatedEvent(EventState);

#[derive(Debug, Clone)]
enum EventState {
    /// The point was reached when the event was recorded.
    Past(Timestamp),
    /// The point is reached by the stream's thread.
    Awaited(Arc<Completion>),
}

#[derive(Debug, Default)]
struct Completion {
    outcome: Mutex<Option<Result<Timestamp, Error>>>,
    /// Signalled when the outcome is set.
    reached: Condvar,
}

impl EmulatedEvent {
    /// Returns an event that is reached now.
    pub(super) fn now() -> Self {
        Self(EventState::Past(monotonic_now()))
    }

    /// Returns an event that [`Self::reach`] is to reach.
    pub(super) fn awaited() -> Self {
        Self(EventState::Awaited(Arc::default()))
    }

    /// Reaches an awaited event, and wakes all that wait for it.
    pub(super) fn reach(&self, outcome: Result<(), Error>) {
        if let EventState::Awaited(completion) = &self.0 {
            *completion.outcome() = Some(outcome.map(|()| monotonic_now()));
            completion.reached.notify_all();
        }
    }
}

impl Completion {
    fn outcome(&self) -> MutexGuard<'_, Option<Result<Timestamp, Error>>> {
        // Ignores a poisoned lock: no foreign code runs under the lock.
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event for EmulatedEvent {
    fn wait(&self) -> Result<Timestamp, Error> {
        let completion = match &self.0 {
            EventState::Past(at) => return Ok(*at),
            EventState::Awaited(completion) => completion,
        };
        let mut outcome = completion.outcome();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            outcome = completion.reached.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
