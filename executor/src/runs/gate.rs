//! The gate of a seat, shared by threads: launches of the seat's runs begin only under a token, if the GPU is
//! shared.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_proto::executor::event::Event;
use millrace_proto::executor::{TokenAsked, TokenSpent};
use millrace_slices::gate::{GateEvent, LaunchPermit, SeatGate, SeatToken};
use millrace_slices::tokens::TokenId;

use crate::socket::events::EventSender;

/// The gate of a seat, shared by the seat's run thread and the control thread.
#[derive(Debug)]
pub(crate) struct LaunchGate {
    seat: u32,
    tokens: Mutex<SeatGate>,
    granted: Condvar,
}

impl LaunchGate {
    pub(crate) fn new(seat: u32) -> Self {
        Self { seat, tokens: Mutex::default(), granted: Condvar::new() }
    }

    /// Begins a new period of the seat. Without a first token, the seat counts as having asked for one.
    pub(crate) fn begin(&self, first: Option<SeatToken>) {
        self.tokens().begin(first);
        self.granted.notify_all();
    }

    pub(crate) fn grant(&self, token: SeatToken) {
        self.tokens().grant(token);
        self.granted.notify_all();
    }

    /// Ends a token after `busy` of device time.
    pub(crate) fn shorten(&self, token: TokenId, busy: Duration, events: &EventSender) {
        let mut tokens = self.tokens();
        let event = tokens.shorten(token, busy);
        self.say(event, &tokens, events);
    }

    /// Takes back a token that has not begun.
    pub(crate) fn withdraw(&self, token: TokenId, events: &EventSender) {
        let mut tokens = self.tokens();
        let event = tokens.withdraw(token);
        self.say(event, &tokens, events);
    }

    /// Waits for permission to launch.
    pub(crate) fn enter(&self, events: &EventSender) -> LaunchPermit {
        let mut tokens = self.tokens();
        loop {
            let (permit, event) = tokens.enter();
            self.say(event, &tokens, events);
            if let Some(permit) = permit {
                return permit;
            }
            tokens = self.granted.wait(tokens).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records the device time of a launch that has ended.
    pub(crate) fn leave(&self, permit: LaunchPermit, took: Duration, events: &EventSender) {
        let mut tokens = self.tokens();
        let event = tokens.leave(permit, took);
        self.say(event, &tokens, events);
    }

    /// Gives the seat's tokens back for the time in which the run waits for weights.
    pub(crate) fn rest(&self, events: &EventSender) {
        let mut tokens = self.tokens();
        let event = tokens.rest();
        self.say(event, &tokens, events);
    }

    /// Returns the token that the seat holds, with the device time of the launches under it.
    pub(crate) fn held(&self) -> Option<(TokenId, Duration)> {
        self.tokens().held()
    }

    /// Sends an event to the worker. The caller holds the lock, so that events about the seat's tokens leave
    /// in their order.
    fn say(&self, event: Option<GateEvent>, _lock: &MutexGuard<'_, SeatGate>, events: &EventSender) {
        let seat = self.seat;
        let event = match event {
            None => return,
            Some(GateEvent::Asked) => Event::TokenAsked(TokenAsked { seat }),
            Some(GateEvent::Spent { token, busy, more }) => {
                let busy_ns = u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX);
                Event::TokenSpent(TokenSpent { seat, token: token.0, busy_ns, more })
            }
        };
        events.send(event);
    }

    fn tokens(&self) -> MutexGuard<'_, SeatGate> {
        // Ignores a poisoned lock: no foreign code runs under the lock, so the state is consistent.
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
