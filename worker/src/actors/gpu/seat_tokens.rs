//! The tokens of a shared GPU's seats on their way between the core and the executor.
//!
//! The core begins a period of a seat with a run. If that run waits for an input, the executor does not know
//! of the period yet. Until then this actor holds the seat's token in place of the executor: a token without
//! an end stays, and any other is given back, so that no SM waits for an input.

use std::time::Duration;

use millrace_gpu::{Event, ExecutorSeat};
use millrace_proto::convert::sm_share_wire;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::{self as wire, Grant, Run, SeatTokens, Shorten, Withdraw};
use millrace_slices::gate::SeatToken;
use millrace_slices::tokens::TokenId;

use super::actor::GpuActor;
use super::unsent_periods::UnsentPeriod;

fn given_back(seat: ExecutorSeat, token: TokenId) -> Event {
    Event::TokenSpent { seat, token, busy: Duration::ZERO, more: false }
}

impl GpuActor {
    pub(super) fn grant(&mut self, seat: ExecutorSeat, token: SeatToken) {
        match self.periods.0.get_mut(&seat) {
            Some(unsent) => unsent.first = Some(token),
            None => {
                let seat = seat.0.into();
                self.send(Command::Grant(Grant { seat, token: Some(token_wire(token)) }), Vec::new());
            }
        }
    }

    pub(super) fn shorten(&mut self, seat: ExecutorSeat, token: TokenId, busy: Duration) {
        match self.periods.0.get_mut(&seat) {
            Some(unsent) => {
                let first = unsent.first.as_mut().filter(|first| first.token == token);
                first.into_iter().for_each(|first| first.busy = Some(busy));
            }
            None => {
                let busy_ns = nanos(busy);
                let shorten = Shorten { seat: seat.0.into(), token: token.0, busy_ns };
                self.send(Command::Shorten(shorten), Vec::new());
            }
        }
    }

    pub(super) fn withdraw(&mut self, seat: ExecutorSeat, token: TokenId) {
        // Only a period that the executor knows has a token ahead.
        if !self.periods.0.contains_key(&seat) {
            let withdraw = Withdraw { seat: seat.0.into(), token: token.0 };
            self.send(Command::Withdraw(withdraw), Vec::new());
        }
    }

    /// Sends a run to the executor. The first run of a period brings the period's first token.
    pub(super) fn send_run(&mut self, mut run: Run, descriptors: Vec<crate::port::Descriptor>) {
        let seat = ExecutorSeat(run.seat as u8);
        if run.tokens.is_some()
            && let Some(UnsentPeriod { first, asks }) = self.periods.0.remove(&seat)
        {
            run.tokens = Some(SeatTokens { anew: true, first: first.map(token_wire) });
            if asks {
                self.data.pending_events.push_back(Event::TokenAsked { seat });
            }
        }
        self.send(Command::Run(run), descriptors);
    }

    /// Gives back the tokens of seats whose first run waits for an input, except tokens without an end.
    pub(super) fn give_tokens_back(&mut self) {
        for (&seat, unsent) in &mut self.periods.0 {
            if let Some(first) = unsent.first.take_if(|first| first.busy.is_some()) {
                unsent.asks = true;
                self.data.pending_events.push_back(given_back(seat, first.token));
            }
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn token_wire(token: SeatToken) -> wire::Token {
    let SeatToken { token, period, on, busy } = token;
    wire::Token { token: token.0, period, on: Some(sm_share_wire(on)), busy_ns: busy.map_or(0, nanos) }
}
