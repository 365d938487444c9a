//! Sequences of a function that keeps state from one request to the next (T11). The core decides
//! which request runs next, on which state, and when a sequence ends. Each function revision on a
//! worker has one core.
//!
//! ```text
//! Arrive ─► waiting ──Run──► running ──Succeeded──► the written state replaces the read one: Release
//!              │                 ├─────Failed─────► the state stays as it was
//!           Refuse               └─────Lost───────► the sequence is over: Refuse the waiting requests
//! ```
//!
//! A request takes effect on its sequence if and only if the request succeeds. The state that the
//! request read stays until the state that it wrote is stored, so the request can run again on the
//! same state. The requests of a sequence run one at a time, in order of arrival. A request that
//! begins a sequence releases the old state when its turn comes. If that request then fails, the
//! sequence does not exist, so the requests behind it do not run on a state that their client
//! believes to be over.
//!
//! A sequence with lost state is remembered for as long as an idle sequence would be, so that later
//! requests get the reason.
//!
//! Bounds: the function's maximum number of sequences, as many remembered lost ones, and
//! [`WAITING_MAX`] waiting requests for each sequence.
//!
//! Deliberately absent: the content and the location of the state. The caller stores the state by
//! its [`StateId`].

mod protocol;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_types::{InSequence, SequenceId, Timestamp};

pub use self::protocol::{Action, Event, SequenceRefusal, SequenceTotals};

use millrace_core::Core;
use millrace_core::ids::{RequestKey, StateId};

/// Maximum number of requests of a sequence that wait behind the running request.
pub const WAITING_MAX: usize = 64;

/// Sequences of a function revision.
#[derive(Debug)]
pub struct SequenceTable {
    max: usize,
    idle: Duration,
    live: BTreeMap<SequenceId, Sequence>,
    /// Sequence of each running or waiting request.
    requests: BTreeMap<RequestKey, SequenceId>,
    /// Sequences without requests, by the end of their last request.
    quiet: BTreeSet<(Timestamp, SequenceId)>,
    /// Sequences with lost state, in order of the loss.
    lost: VecDeque<(Timestamp, SequenceId)>,
    next: u64,
    counts: SequenceTotals,
}

#[derive(Debug, Default)]
struct Sequence {
    /// Present state; `None` before the first request succeeded.
    state: Option<StateId>,
    running: Option<RunningRequest>,
    /// Waiting requests; empty while no request runs.
    waiting: VecDeque<WaitingInSequence>,
    /// End of the last request.
    used: Timestamp,
}

#[derive(Debug)]
struct RunningRequest {
    key: RequestKey,
    writes: StateId,
    end: bool,
}

#[derive(Debug)]
struct WaitingInSequence {
    key: RequestKey,
    start: bool,
    end: bool,
}

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestOutcome {
    Succeeded,
    Failed,
    Lost,
}

impl SequenceTable {
    /// Creates an empty table of at most `max` sequences, each of which expires after `idle`
    /// without requests.
    #[must_use]
    pub fn new(max: usize, idle: Duration) -> Self {
        Self {
            max,
            idle,
            live: BTreeMap::new(),
            requests: BTreeMap::new(),
            quiet: BTreeSet::new(),
            lost: VecDeque::new(),
            next: 1,
            counts: SequenceTotals::default(),
        }
    }

    /// Returns the number of sequences.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Returns the counters of ended sequences.
    #[must_use]
    pub fn counts(&self) -> SequenceTotals {
        self.counts
    }

    /// Ends the sequences without recent requests, and forgets sequences that were lost as long
    /// ago.
    fn expire(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while self.quiet.first().is_some_and(|(used, _)| *used + self.idle <= now) {
            let Some((_, id)) = self.quiet.pop_first() else { return };
            let state = self.live.remove(&id).and_then(|sequence| sequence.state);
            actions.extend(state.map(|state| Action::Release { state }));
            self.counts.idle += 1;
        }
        while self.lost.front().is_some_and(|(when, _)| *when + self.idle <= now) {
            self.lost.pop_front();
        }
    }

    fn arrive(&mut self, now: Timestamp, key: RequestKey, place: InSequence, actions: &mut Vec<Action>) {
        let InSequence { id, start, end } = place;
        let refusal = match self.live.get(&id) {
            None if !start && self.lost.iter().any(|(_, lost)| *lost == id) => Some(SequenceRefusal::Lost),
            None if !start => Some(SequenceRefusal::Unknown),
            None if self.live.len() >= self.max => Some(SequenceRefusal::TableFull),
            Some(sequence) if sequence.waiting.len() >= WAITING_MAX => Some(SequenceRefusal::QueueFull),
            None | Some(_) => None,
        };
        if let Some(why) = refusal {
            actions.push(Action::Refuse { key, why });
            return;
        }
        self.lost.retain(|(_, lost)| *lost != id);
        self.requests.insert(key, id.clone());
        let sequence = self.live.entry(id.clone()).or_default();
        sequence.waiting.push_back(WaitingInSequence { key, start, end });
        self.quiet.remove(&(sequence.used, id.clone()));
        self.advance(now, id, SequenceRefusal::Unknown, actions);
    }

    /// Starts the next request that can run, if none is running. Requests that cannot run are
    /// refused with `why`.
    fn advance(&mut self, now: Timestamp, id: SequenceId, why: SequenceRefusal, actions: &mut Vec<Action>) {
        let Some(sequence) = self.live.get_mut(&id) else { return };
        while sequence.running.is_none()
            && let Some(WaitingInSequence { key, start, end }) = sequence.waiting.pop_front()
        {
            if start {
                actions.extend(sequence.state.take().map(|state| Action::Release { state }));
            } else if sequence.state.is_none() {
                self.requests.remove(&key);
                actions.push(Action::Refuse { key, why });
                continue;
            }
            let writes = StateId(self.next);
            self.next += 1;
            sequence.running = Some(RunningRequest { key, writes, end });
            actions.push(Action::Run { key, reads: sequence.state, writes });
        }
        match (sequence.running.is_some(), sequence.state) {
            (true, _) => {}
            (false, Some(_)) => {
                sequence.used = now;
                self.quiet.insert((now, id));
            }
            (false, None) => {
                self.live.remove(&id);
                if why == SequenceRefusal::Lost {
                    self.lost.push_back((now, id));
                    if self.lost.len() > self.max {
                        self.lost.pop_front();
                    }
                }
            }
        }
    }

    fn ended(&mut self, now: Timestamp, key: RequestKey, end: RequestOutcome, actions: &mut Vec<Action>) {
        let Some(id) = self.requests.remove(&key) else { return };
        let Some(sequence) = self.live.get_mut(&id) else { return };
        let Some(running) = sequence.running.take_if(|running| running.key == key) else {
            // The request was waiting.
            sequence.waiting.retain(|waiting| waiting.key != key);
            return;
        };
        let release = |state: Option<StateId>| state.map(|state| Action::Release { state });
        let mut why = SequenceRefusal::Unknown;
        match end {
            RequestOutcome::Succeeded => {
                actions.extend(release(sequence.state.replace(running.writes)));
                if running.end {
                    actions.extend(release(sequence.state.take()));
                }
            }
            RequestOutcome::Failed => {}
            RequestOutcome::Lost => {
                actions.extend(release(sequence.state.take()));
                self.counts.lost += 1;
                why = SequenceRefusal::Lost;
            }
        }
        self.advance(now, id, why, actions);
    }

    /// Handles the loss of a state that no request was reading. A running request reports the loss
    /// of its own input state.
    fn state_lost(&mut self, now: Timestamp, state: StateId, actions: &mut Vec<Action>) {
        let has = |sequence: &Sequence| sequence.state == Some(state) && sequence.running.is_none();
        let Some((id, sequence)) = self.live.iter_mut().find(|(_, sequence)| has(sequence)) else { return };
        let id = id.clone();
        sequence.state = None;
        self.quiet.remove(&(sequence.used, id.clone()));
        actions.push(Action::Release { state });
        self.counts.lost += 1;
        self.advance(now, id, SequenceRefusal::Lost, actions);
    }
}

impl Core for SequenceTable {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        match event {
            Event::Arrive { key, place } => self.arrive(now, key, place, actions),
            Event::Succeeded { key } => self.ended(now, key, RequestOutcome::Succeeded, actions),
            Event::Failed { key } => self.ended(now, key, RequestOutcome::Failed, actions),
            Event::Lost { key } => self.ended(now, key, RequestOutcome::Lost, actions),
            Event::StateLost { state } => self.state_lost(now, state, actions),
            Event::Tick => {}
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.quiet.first().map(|(used, _)| *used + self.idle)
    }
}

#[cfg(test)]
mod tests;
