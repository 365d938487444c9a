//! The sequences of one function revision: their core, their stored state, and the requests that
//! wait for their turn.

use std::collections::BTreeMap;

use millrace_core::Core as _;
use millrace_core::ids::{RequestKey, StateId};
use millrace_scheduling::sequences::{Action, Event, SequenceRefusal, SequenceTable, SequenceTotals};
use millrace_types::{InSequence, Timestamp};
use tokio::sync::oneshot;

use crate::objects::{Contents, ObjectReservation};
use crate::signature::FunctionState;

/// Stored state: its tensors in order, and their reservation.
pub(super) struct SequenceState {
    pub(super) tensors: Vec<Contents>,
    pub(super) claim: ObjectReservation,
}

/// Tensors of state that no request reads again. The drop happens without a lock, because the last
/// handle of an object sends a message to its GPU.
pub(super) type Released = Vec<Contents>;

/// The state that a request reads and writes in its turn.
#[derive(Debug)]
pub(super) struct TurnGrant {
    /// State to read; `None`: zeros.
    pub(super) reads: Option<Vec<Contents>>,
    /// Id under which the new state is stored.
    pub(super) writes: StateId,
}

/// Sender that ends a request's wait for its turn.
type TurnSender = oneshot::Sender<Result<TurnGrant, SequenceRefusal>>;

pub(super) struct Table {
    /// The request for which the table was made. No other table has this request, so the request
    /// identifies the table.
    pub(super) first: RequestKey,
    core: SequenceTable,
    held: BTreeMap<StateId, SequenceState>,
    waiting: BTreeMap<RequestKey, TurnSender>,
}

impl Table {
    pub(super) fn new(state: &FunctionState, first: RequestKey) -> Self {
        let core = SequenceTable::new(state.max as usize, state.idle);
        Self { first, core, held: BTreeMap::new(), waiting: BTreeMap::new() }
    }

    /// Adds a request, which waits at `told`. Returns the state that is no longer needed, as the
    /// other methods do.
    pub(super) fn arrive(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        place: InSequence,
        told: TurnSender,
    ) -> Released {
        self.waiting.insert(key, told);
        self.tell(now, Event::Arrive { key, place })
    }

    /// Records that a request ran and wrote this state; `None` if the request ended its sequence.
    pub(super) fn succeeded(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        wrote: Option<(StateId, SequenceState)>,
    ) -> Released {
        self.held.extend(wrote);
        self.tell(now, Event::Succeeded { key })
    }

    pub(super) fn tell(&mut self, now: Timestamp, event: Event) -> Released {
        if let Event::Failed { key } = event {
            // The request waits no longer.
            self.waiting.remove(&key);
        }
        let mut actions = Vec::new();
        self.core.on_event(now, event, &mut actions);
        let mut released = Vec::new();
        for action in actions {
            match action {
                Action::Run { key, reads, writes } => {
                    // The core releases no state that is still to be read.
                    let reads = reads.map(|id| self.held[&id].tensors.clone());
                    self.answer(key, Ok(TurnGrant { reads, writes }));
                }
                Action::Refuse { key, why } => self.answer(key, Err(why)),
                Action::Release { state } => {
                    let Some(SequenceState { tensors, claim }) = self.held.remove(&state) else { continue };
                    // Release the reservation at once: the next request reserves memory when its
                    // turn begins.
                    drop(claim);
                    released.extend(tensors);
                }
            }
        }
        released
    }

    /// Answers a waiting request. A request that has given up needs no answer.
    fn answer(&mut self, key: RequestKey, answer: Result<TurnGrant, SequenceRefusal>) {
        if let Some(told) = self.waiting.remove(&key) {
            drop(told.send(answer));
        }
    }

    /// Ends idle sequences, and sequences that lost their state.
    pub(super) fn sweep(&mut self, now: Timestamp) -> Released {
        let mut released = self.tell(now, Event::Tick);
        let is_lost = |(id, held): (&StateId, &SequenceState)| {
            held.tensors.iter().any(Contents::is_lost).then_some(*id)
        };
        let lost: Vec<_> = self.held.iter().filter_map(is_lost).collect();
        for state in lost {
            released.extend(self.tell(now, Event::StateLost { state }));
        }
        released
    }

    pub(super) fn live(&self) -> usize {
        self.core.live()
    }

    pub(super) fn counts(&self) -> SequenceTotals {
        self.core.counts()
    }
}
