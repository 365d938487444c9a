//! The shape all the state machines here share, so that one driver fits them all.

use std::hash::Hash;

use millrace_types::Timestamp;

use crate::decision_text::DecisionText;

/// A state machine: events in, actions out. It never reads a clock, draws a random number or does
/// I/O; the same events at the same times give the same actions.
pub trait Core {
    /// What it is told.
    type Event: Hash;
    /// What it wants done.
    type Action: Hash;

    /// Takes an event and adds what is to be done to `actions`, in order.
    fn on_event(&mut self, now: Timestamp, event: Self::Event, actions: &mut Vec<Self::Action>);

    /// Describes an action as a decision of the [canonical text](crate::decision_text). `None`: the action follows
    /// from decisions, or prepares one.
    fn decision(_action: &Self::Action) -> Option<DecisionText> {
        None
    }

    /// When it has to be told that time has passed, if nothing else comes before.
    fn next_wake(&self) -> Option<Timestamp> {
        None
    }
}
