//! The sequences of one function revision: its core, the state that it speaks of, and those who wait for
//! their turn.

use std::collections::BTreeMap;

use millrace_policy::core::Core as _;
use millrace_policy::ids::{RequestKey, StateId};
use millrace_policy::sequences::{Action, Counts, Event, Refusal, Sequences};
use millrace_types::{InSequence, Timestamp};
use tokio::sync::oneshot;

use crate::host_tier::State;
use crate::objects::{Claim, Contents};

/// State that is held: its tensors in their order, and their room.
pub(super) struct Held {
    pub(super) tensors: Vec<Contents>,
    pub(super) claim: Claim,
}

/// Tensors of state that nobody reads again, to be dropped without a lock held: the last handle of an
/// object tells its GPU.
pub(super) type Released = Vec<Contents>;

/// What a request is given with its turn.
#[derive(Debug)]
pub(super) struct Given {
    /// What it reads; `None`: zeros.
    pub(super) reads: Option<Vec<Contents>>,
    /// What it writes is held under this.
    pub(super) writes: StateId,
}

/// Where a request waits for its turn.
type Told = oneshot::Sender<Result<Given, Refusal>>;

pub(super) struct Table {
    /// The request that it was made for: no other table has had it.
    pub(super) first: RequestKey,
    core: Sequences,
    held: BTreeMap<StateId, Held>,
    waiting: BTreeMap<RequestKey, Told>,
}

impl Table {
    pub(super) fn new(state: &State, first: RequestKey) -> Self {
        let core = Sequences::new(state.max as usize, state.idle);
        Self { first, core, held: BTreeMap::new(), waiting: BTreeMap::new() }
    }

    /// A request came, and waits there. Gives what is let go of, as the others do.
    pub(super) fn arrive(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        place: InSequence,
        told: Told,
    ) -> Released {
        self.waiting.insert(key, told);
        self.tell(now, Event::Arrive { key, place })
    }

    /// A request ran, and wrote this; nothing, where it ends its sequence.
    pub(super) fn succeeded(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        wrote: Option<(StateId, Held)>,
    ) -> Released {
        self.held.extend(wrote);
        self.tell(now, Event::Succeeded { key })
    }

    pub(super) fn tell(&mut self, now: Timestamp, event: Event) -> Released {
        if let Event::Failed { key } = event {
            // Where it waits, nobody does any more.
            self.waiting.remove(&key);
        }
        let mut actions = Vec::new();
        self.core.on_event(now, event, &mut actions);
        let mut released = Vec::new();
        for action in actions {
            match action {
                Action::Run { key, reads, writes } => {
                    // The core lets go of nothing that is still to be read.
                    let reads = reads.map(|id| self.held[&id].tensors.clone());
                    self.answer(key, Ok(Given { reads, writes }));
                }
                Action::Refuse { key, why } => self.answer(key, Err(why)),
                Action::Release { state } => {
                    let Some(Held { tensors, claim }) = self.held.remove(&state) else { continue };
                    // At once: whoever is told next that it is its turn takes room for what it writes.
                    drop(claim);
                    released.extend(tensors);
                }
            }
        }
        released
    }

    /// Tells a request. One that has given up since says so by itself.
    fn answer(&mut self, key: RequestKey, answer: Result<Given, Refusal>) {
        if let Some(told) = self.waiting.remove(&key) {
            drop(told.send(answer));
        }
    }

    /// Ends what is idle, and what has lost its state.
    pub(super) fn sweep(&mut self, now: Timestamp) -> Released {
        let mut released = self.tell(now, Event::Tick);
        let is_lost =
            |(id, held): (&StateId, &Held)| held.tensors.iter().any(Contents::is_lost).then_some(*id);
        let lost: Vec<_> = self.held.iter().filter_map(is_lost).collect();
        for state in lost {
            released.extend(self.tell(now, Event::StateLost { state }));
        }
        released
    }

    pub(super) fn live(&self) -> usize {
        self.core.live()
    }

    pub(super) fn counts(&self) -> Counts {
        self.core.counts()
    }
}
