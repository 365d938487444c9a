//! The trait of state machines that take events and return actions, so that one driver fits all that
//! implement it.

use std::hash::Hash;

use millrace_types::Timestamp;

use crate::decision_text::DecisionText;

/// A state machine: events in, actions out. A core never reads a clock, draws a random number or
/// does I/O; the same events at the same times give the same actions.
pub trait Core {
    /// Input of the core.
    type Event: Hash;
    /// Output of the core, for the driver to carry out.
    type Action: Hash;

    /// Handles an event, and appends the resulting actions to `actions`, in order.
    fn on_event(&mut self, now: Timestamp, event: Self::Event, actions: &mut Vec<Self::Action>);

    /// Describes an action as a decision of the [canonical text](crate::decision_text). `None`: the
    /// action follows from decisions, or prepares a decision.
    fn decision(_action: &Self::Action) -> Option<DecisionText> {
        None
    }

    /// Returns the time by which the driver has to send a tick, if no other event arrives before.
    fn next_wake(&self) -> Option<Timestamp> {
        None
    }
}
