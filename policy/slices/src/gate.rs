//! The gate of a seat: what an executor does with the tokens of a seat. A launch begins only under a token.
//!
//! ```text
//! first token, grant, shorten, withdraw ─► SeatGate ─► permit to launch on the SMs of the token
//!                         token core ◄─ Asked, Spent ─┘
//! ```
//! A token counts the device time of launches, and no time between launches. The last launch of a token
//! begins within the token's time, so a seat overshoots a token by at most one launch. While a run waits
//! for weights, the seat gives its tokens back, unless the token has no end: then no other seat wants it.
//!
//! Messages between the gate and the token core are under way for a while. So a grant may be for a token
//! that the seat has given back meanwhile: the gate recognizes such a token by its period.

use std::time::Duration;

use millrace_types::SmShare;

use crate::tokens::TokenId;

/// Longest run that is a single launch under a token without an end. Such a token may get an end at any time, and
/// a longer launch would exceed it by too much.
pub const WHOLE_RUN_MAX: Duration = Duration::from_millis(10);

/// Permission for a seat to launch on certain SMs for a certain time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeatToken {
    pub token: TokenId,
    /// The seat's period that the token belongs to. Numbers of periods only grow.
    pub period: u64,
    pub on: SmShare,
    /// Device time of the launches under the token; `None` for a token without an end.
    pub busy: Option<Duration>,
}

/// Permission for one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchPermit {
    token: TokenId,
    pub on: SmShare,
    /// Whether the token has no end, so that a launch may be as long as the whole model.
    pub open: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeldToken {
    token: SeatToken,
    /// Device time of the launches under the token so far.
    used: Duration,
}

impl HeldToken {
    fn new(token: SeatToken) -> Self {
        Self { token, used: Duration::ZERO }
    }

    fn is_spent(&self) -> bool {
        self.token.busy.is_some_and(|busy| self.used >= busy)
    }

    fn half_used(&self) -> bool {
        self.token.busy.is_some_and(|busy| self.used * 2 >= busy)
    }
}

/// The tokens that a seat holds. Each step returns the event for the token core, if any.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct SeatGate {
    held: Option<HeldToken>,
    next: Option<SeatToken>,
    /// Whether the core knows that the seat wants a token, or another token.
    asked: bool,
    /// Tokens of this period and earlier ones are void.
    void: u64,
    /// Whether the run waits for weights, so that the seat launches nothing.
    waits_for_weights: bool,
}

/// An event for the token core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateEvent {
    /// The seat wants a token; if it holds a token, the token after that.
    Asked,
    /// A token was used up or given back. Without `more`, the seat has given back all tokens.
    Spent { token: TokenId, busy: Duration, more: bool },
}

impl SeatGate {
    /// Begins a new period of the seat. Without a first token, the seat counts as having asked for one.
    pub fn begin(&mut self, first: Option<SeatToken>) {
        let void = self.void;
        *self = Self { held: first.map(HeldToken::new), asked: first.is_none(), void, ..Self::default() };
    }

    /// Takes a token, which begins after the present token.
    pub fn grant(&mut self, token: SeatToken) {
        if token.period <= self.void {
            return;
        }
        self.asked = false;
        match self.held {
            None => self.held = Some(HeldToken::new(token)),
            Some(_) => self.next = Some(token),
        }
    }

    /// Ends a token after `busy` of device time. Another token than the present one is ignored.
    pub fn shorten(&mut self, token: TokenId, busy: Duration) -> Option<GateEvent> {
        let held = self.held.as_mut().filter(|held| held.token.token == token)?;
        held.token.busy = Some(busy);
        if self.waits_for_weights { self.give_back() } else { None }
    }

    /// Gives a token back that has not begun. Every other token is ignored.
    pub fn withdraw(&mut self, token: TokenId) -> Option<GateEvent> {
        self.next.take_if(|next| next.token == token)?;
        // The core grants another token once it can.
        self.asked = true;
        Some(GateEvent::Spent { token, busy: Duration::ZERO, more: true })
    }

    /// Returns the permit for a launch, or `None` if the launch has to wait for a token.
    pub fn enter(&mut self) -> (Option<LaunchPermit>, Option<GateEvent>) {
        self.waits_for_weights = false;
        let mut event = None;
        if let Some(spent) = self.held.take_if(|held| held.is_spent()) {
            self.held = self.next.take().map(HeldToken::new);
            self.asked |= self.held.is_none();
            event = Some(GateEvent::Spent { token: spent.token.token, busy: spent.used, more: true });
        }
        if self.held.is_none() && !self.asked {
            self.asked = true;
            event = Some(GateEvent::Asked);
        }
        let permit = |held: HeldToken| {
            let SeatToken { token, on, busy, .. } = held.token;
            LaunchPermit { token, on, open: busy.is_none() }
        };
        (self.held.map(permit), event)
    }

    /// Records the device time of a launch.
    pub fn leave(&mut self, permit: LaunchPermit, took: Duration) -> Option<GateEvent> {
        let held = self.held.as_mut().filter(|held| held.token.token == permit.token)?;
        held.used += took;
        if held.half_used() && self.next.is_none() && !self.asked {
            self.asked = true;
            return Some(GateEvent::Asked);
        }
        None
    }

    /// Gives all tokens back, because the run waits for weights. A token without an end stays.
    pub fn rest(&mut self) -> Option<GateEvent> {
        self.waits_for_weights = true;
        if self.held.is_some_and(|held| held.token.busy.is_some()) { self.give_back() } else { None }
    }

    /// Returns the present token, with the device time of the launches under it.
    #[must_use]
    pub fn held(&self) -> Option<(TokenId, Duration)> {
        self.held.map(|held| (held.token.token, held.used))
    }

    fn give_back(&mut self) -> Option<GateEvent> {
        let held = self.held.take()?;
        self.next = None;
        self.asked = false;
        self.void = self.void.max(held.token.period);
        Some(GateEvent::Spent { token: held.token.token, busy: held.used, more: false })
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::UnitSet;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn token(token: u64, busy: Option<u32>) -> SeatToken {
        let on = SmShare::Block(UnitSet::ALL);
        SeatToken { token: TokenId(token), period: 1, on, busy: busy.map(|ms| MS * ms) }
    }

    fn spent(token: u64, ms: u32, more: bool) -> Option<GateEvent> {
        Some(GateEvent::Spent { token: TokenId(token), busy: MS * ms, more })
    }

    /// Launches once, and returns the events and whether there was permission.
    fn launch(tokens: &mut SeatGate, ms: u32) -> (bool, [Option<GateEvent>; 2]) {
        let (permit, before) = tokens.enter();
        let after = permit.and_then(|permit| tokens.leave(permit, MS * ms));
        (permit.is_some(), [before, after])
    }

    #[test]
    fn a_token_without_an_end_permits_launches_without_a_message() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, None)));
        assert!((0..100).all(|_| launch(&mut tokens, 10) == (true, [None, None])));
        // The token stays for the time in which the run waits for weights.
        assert_eq!(tokens.rest(), None);
        assert_eq!(launch(&mut tokens, 10), (true, [None, None]));
    }

    #[test]
    fn a_seat_asks_at_half_of_a_token_and_continues_under_the_next() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, Some(5))));
        assert_eq!(launch(&mut tokens, 2), (true, [None, None]));
        assert_eq!(launch(&mut tokens, 2), (true, [None, Some(GateEvent::Asked)]));
        tokens.grant(token(2, Some(5)));
        // The last launch begins within the token, and exceeds it.
        assert_eq!(launch(&mut tokens, 3), (true, [None, None]));
        assert_eq!(launch(&mut tokens, 1), (true, [spent(1, 7, true), None]));
        assert_eq!(tokens.held.unwrap().used, MS);
    }

    #[test]
    fn nothing_is_launched_without_a_token() {
        let mut tokens = SeatGate::default();
        tokens.begin(None);
        assert_eq!(launch(&mut tokens, 1), (false, [None, None]), "the core knows of the wish");
        tokens.grant(token(1, Some(5)));
        assert_eq!(launch(&mut tokens, 9), (true, [None, Some(GateEvent::Asked)]));
        assert_eq!(launch(&mut tokens, 1), (false, [spent(1, 9, true), None]));
        assert_eq!(launch(&mut tokens, 1), (false, [None, None]));
    }

    #[test]
    fn a_shortened_token_ends_after_the_given_time() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, None)));
        launch(&mut tokens, 7);
        assert_eq!(tokens.shorten(TokenId(1), MS * 10), None);
        assert_eq!(launch(&mut tokens, 2), (true, [None, Some(GateEvent::Asked)]));
        assert_eq!(launch(&mut tokens, 2), (true, [None, None]));
        assert_eq!(launch(&mut tokens, 2), (false, [spent(1, 11, true), None]));
        assert_eq!(tokens.shorten(TokenId(1), MS), None, "the token is not known any longer");
    }

    #[test]
    fn a_withdrawn_token_is_given_back_unless_it_has_begun() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, Some(5))));
        launch(&mut tokens, 4);
        tokens.grant(token(2, Some(5)));
        assert_eq!(tokens.withdraw(TokenId(1)), None);
        assert_eq!(tokens.withdraw(TokenId(2)), spent(2, 0, true));
        launch(&mut tokens, 4);
        assert_eq!(launch(&mut tokens, 4), (false, [spent(1, 8, true), None]));
        tokens.grant(token(3, Some(5)));
        assert!(launch(&mut tokens, 1).0);
        assert_eq!(tokens.withdraw(TokenId(3)), None);
    }

    /// The grant was under way when the seat gave its tokens back, so its SMs are another seat's now.
    #[test]
    fn a_seat_gives_its_tokens_back_before_it_waits_for_weights() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, Some(5))));
        launch(&mut tokens, 3);
        assert_eq!(tokens.rest(), spent(1, 3, false));
        tokens.grant(token(2, Some(5)));
        assert_eq!(launch(&mut tokens, 1), (false, [Some(GateEvent::Asked), None]));
        tokens.grant(token(2, Some(5)));
        assert!(!launch(&mut tokens, 1).0, "the token is of the period that has ended");
        tokens.grant(SeatToken { period: 2, ..token(3, Some(5)) });
        assert!(launch(&mut tokens, 1).0);
    }

    #[test]
    fn a_token_that_is_shortened_while_the_run_waits_for_weights_is_given_back() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, None)));
        launch(&mut tokens, 3);
        assert_eq!(tokens.rest(), None);
        assert_eq!(tokens.shorten(TokenId(1), MS * 5), spent(1, 3, false));
    }

    #[test]
    fn the_tokens_of_an_earlier_period_are_void() {
        let mut tokens = SeatGate::default();
        tokens.begin(Some(token(1, Some(5))));
        launch(&mut tokens, 3);
        tokens.grant(token(2, Some(5)));
        tokens.begin(None);
        assert!(!launch(&mut tokens, 1).0);
    }
}
