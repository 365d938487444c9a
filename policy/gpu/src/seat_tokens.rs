//! The tokens of a shared GPU's seats. The token core decides which seat may launch on which SMs; this
//! module tells the core which seats have runs, and the executor what the core decides.
//!
//! A seat's *period* lasts while the seat has runs in the executor. The runs of a period use the seat's
//! tokens one after another. A period ends early if a run waits for weights: the seat then gives its tokens
//! back, and asks again once the weights are there.

use std::fmt;
use std::time::Duration;

use millrace_core::SEATS_MAX;
use millrace_core::ids::RunId;
use millrace_slices::gate::SeatToken;
use millrace_slices::tokens::{
    Action as TokenAction, Config, Event as TokenEvent, RunId as TokenHolder, TokenCore, TokenId,
};
use millrace_types::{ComputeCurve, Permille, SliceId, SmShare, Terms, Timestamp};

use super::gpu_core::GpuCore;
use super::lines::LinePlace;
use super::protocol::Action;

/// The number of a seat in its executor, from 0 to 15.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutorSeat(pub u8);

impl fmt::Display for ExecutorSeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How a run on a shared GPU comes by its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunTokens {
    /// Whether a period of the seat begins, so that all earlier tokens of the seat are void.
    pub anew: bool,
    /// The first token of a new period; `None` if the token follows.
    pub first: Option<SeatToken>,
}

/// The slice of all requests without a slice of their own: on any of the SMs, at any time.
const FREE_SLICE: SliceId = SliceId(0);

fn free_terms() -> Terms {
    // 6% of the SMs: a single unit.
    let least = Permille::new(60).unwrap_or(Permille::ALL);
    Terms::new(least, Permille::ALL, Permille::ZERO, Permille::ALL).expect("the least share is above zero")
}

/// The assumed speed of a model, as no model is profiled. With it a lone run has the whole GPU, and runs at the
/// same time have about equal parts.
const ASSUMED_CURVE: ComputeCurve = ComputeCurve::PROPORTIONAL;

/// A period of a seat.
#[derive(Debug, Clone, Copy)]
struct SeatPeriod {
    number: u64,
    /// The last token that was granted before the period began.
    after: Option<TokenId>,
    /// The SMs of the last token.
    on: Option<SmShare>,
}

/// The tokens of all seats of a GPU.
#[derive(Debug)]
pub(super) struct SeatTokens {
    pub(super) config: Config,
    core: TokenCore,
    periods: [Option<SeatPeriod>; SEATS_MAX],
    last_period: u64,
    last_token: Option<TokenId>,
    /// Actions of the token core in the present step.
    decided: Vec<TokenAction>,
}

impl SeatTokens {
    /// Returns the tokens of a GPU without runs. Numbers of periods continue after `last_period`.
    fn new(config: Config, last_period: u64, now: Timestamp) -> Self {
        let mut core = TokenCore::new(config);
        core.on_event(now, TokenEvent::Terms { slice: FREE_SLICE, terms: free_terms() }, &mut Vec::new());
        Self { config, core, periods: [None; SEATS_MAX], last_period, last_token: None, decided: Vec::new() }
    }

    /// Whether no seat has a period or a token.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.periods.iter().all(Option::is_none) && self.core.is_idle()
    }

    fn period(&self, seat: ExecutorSeat) -> Option<SeatPeriod> {
        self.periods.get(usize::from(seat.0)).copied().flatten()
    }

    fn decide(&mut self, now: Timestamp, event: TokenEvent) {
        self.core.on_event(now, event, &mut self.decided);
    }

    /// Tells the core that a seat wants a token. Returns whether a period of the seat begins.
    fn ask(&mut self, now: Timestamp, seat: ExecutorSeat, deadline: Option<Timestamp>) -> bool {
        let begun = self.period(seat);
        let number = begun.map_or(self.last_period + 1, |period| period.number);
        if begun.is_none() {
            self.last_period = number;
            let period = SeatPeriod { number, after: self.last_token, on: None };
            self.periods[usize::from(seat.0)] = Some(period);
        }
        let run = TokenHolder(number);
        self.decide(now, TokenEvent::Ask { slice: FREE_SLICE, run, deadline, curve: ASSUMED_CURVE });
        begun.is_none()
    }

    /// Ends the period of a seat that has no runs any longer.
    fn end(&mut self, now: Timestamp, seat: ExecutorSeat) {
        if let Some(period) = self.periods[usize::from(seat.0)].take() {
            self.decide(now, TokenEvent::Left { run: TokenHolder(period.number) });
        }
    }

    fn spent(&mut self, now: Timestamp, seat: ExecutorSeat, token: TokenId, busy: Duration, more: bool) {
        let Some(period) = self.period(seat).filter(|period| period.after.is_none_or(|last| token > last))
        else {
            return;
        };
        self.decide(now, TokenEvent::Spent { run: TokenHolder(period.number), token, busy, more });
        if !more {
            self.periods[usize::from(seat.0)] = None;
        }
    }

    /// Returns the decisions of the core as actions. The first token of `begun`, a seat whose run is about to
    /// be sent, is returned apart.
    fn take_decisions(
        &mut self,
        begun: Option<ExecutorSeat>,
        actions: &mut Vec<Action>,
    ) -> Option<SeatToken> {
        let mut first = None;
        for decision in std::mem::take(&mut self.decided) {
            match decision {
                TokenAction::Grant { run, token, on, busy, until: _ } => {
                    self.last_token = self.last_token.max(Some(token));
                    let Some(seat) = self.seat_of(run) else { continue };
                    if let Some(period) = &mut self.periods[usize::from(seat.0)] {
                        period.on = Some(on);
                    }
                    let granted = SeatToken { token, period: run.0, on, busy };
                    if begun == Some(seat) {
                        first = Some(granted);
                    } else {
                        actions.push(Action::Grant { seat, token: granted });
                    }
                }
                TokenAction::Shorten { run, token, busy } => {
                    let seat = self.seat_of(run);
                    actions.extend(seat.map(|seat| Action::Shorten { seat, token, busy }));
                }
                TokenAction::Withdraw { run, token } => {
                    actions.extend(self.seat_of(run).map(|seat| Action::Withdraw { seat, token }));
                }
                // Only slices with an owner have a request, and only the profiler reads samples.
                TokenAction::Starved { .. } | TokenAction::Sample { .. } => {}
            }
        }
        first
    }

    fn seat_of(&self, run: TokenHolder) -> Option<ExecutorSeat> {
        let of = |period: &Option<SeatPeriod>| period.is_some_and(|period| period.number == run.0);
        (0..).map(ExecutorSeat).zip(&self.periods).find(|(_, period)| of(period)).map(|(seat, _)| seat)
    }
}

impl GpuCore {
    /// Sets whether and how the GPU is shared. The change takes effect once no run is in the executor; until
    /// then no further run is sent there.
    pub(super) fn share(&mut self, sharing: Option<Config>) {
        self.sharing = sharing;
    }

    /// Carries out a change of the sharing if possible. Returns whether runs have to wait for the change.
    pub(super) fn sharing_changes(&mut self, now: Timestamp) -> bool {
        if self.tokens.as_ref().map(|tokens| tokens.config) == self.sharing {
            return false;
        }
        if self.lines.iter().any(|slot| slot.run().is_some()) {
            return true;
        }
        let last_period = self.last_period();
        self.tokens = self.sharing.map(|config| SeatTokens::new(config, last_period, now));
        self.last_period = last_period;
        false
    }

    fn last_period(&self) -> u64 {
        self.tokens.as_ref().map_or(self.last_period, |tokens| tokens.last_period)
    }

    /// Forgets all tokens, because the executor is lost.
    pub(super) fn lose_tokens(&mut self) {
        self.last_period = self.last_period();
        self.tokens = None;
    }

    /// Returns how a run that is about to be sent comes by its tokens; `None` if the GPU is not shared.
    pub(super) fn tokens_for(
        &mut self,
        now: Timestamp,
        place: LinePlace,
        actions: &mut Vec<Action>,
    ) -> Option<RunTokens> {
        let deadline = self.lines.get(place).and_then(|slot| slot.deadline);
        let seat = self.lines.seat(place);
        let sent = self.lines.sent_runs(seat);
        let tokens = self.tokens.as_mut()?;
        // A run ahead that waits for weights has no period now, and will ask for one.
        if sent > 1 {
            return Some(RunTokens { anew: false, first: None });
        }
        tokens.ask(now, seat, deadline);
        let first = tokens.take_decisions(Some(seat), actions);
        Some(RunTokens { anew: true, first })
    }

    /// Handles the wish of a seat for a token.
    pub(super) fn token_asked(&mut self, now: Timestamp, seat: ExecutorSeat, actions: &mut Vec<Action>) {
        let Some(line) = self.lines.line_of(seat) else { return };
        let head = self.lines.get(LinePlace::first_in(line)).filter(|head| head.run().is_some());
        let Some((tokens, head)) = self.tokens.as_mut().zip(head) else { return };
        tokens.ask(now, seat, head.deadline);
        tokens.take_decisions(None, actions);
    }

    pub(super) fn token_spent(
        &mut self,
        now: Timestamp,
        seat: ExecutorSeat,
        token: TokenId,
        busy: Duration,
        more: bool,
        actions: &mut Vec<Action>,
    ) {
        if let Some(tokens) = &mut self.tokens {
            tokens.spent(now, seat, token, busy, more);
            tokens.take_decisions(None, actions);
        }
    }

    /// Gives back the token that a seat holds after the end of its last run.
    pub(super) fn token_after_run(
        &mut self,
        now: Timestamp,
        run: RunId,
        token: Option<(TokenId, Duration)>,
        actions: &mut Vec<Action>,
    ) {
        let Some((token, busy)) = token else { return };
        let Some(place) = self.lines.place_of_run(run) else { return };
        let seat = self.lines.seat(place);
        if self.lines.sent_runs(seat) == 1 {
            self.token_spent(now, seat, token, busy, false, actions);
        }
    }

    /// Ends the periods of seats that have no run in the executor.
    pub(super) fn end_seat_periods(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(tokens) = &mut self.tokens else { return };
        for seat in (0..SEATS_MAX as u8).map(ExecutorSeat) {
            if tokens.period(seat).is_some() && self.lines.sent_runs(seat) == 0 {
                tokens.end(now, seat);
            }
        }
        tokens.take_decisions(None, actions);
    }

    /// Gives back the memory of runs beside others that have ended.
    pub(super) fn give_back_workspaces(&mut self) {
        let lines = &self.lines;
        let memory = &mut self.memory;
        self.workspaces.retain_mut(|workspace| {
            let kept = lines.sends(workspace.seat, workspace.model);
            if !kept {
                workspace.blocks.drain(..).for_each(|run| memory.give_back_block(run));
            }
            kept
        });
    }

    /// Lets the token core decide after time has passed.
    pub(super) fn tick_tokens(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if let Some(tokens) = &mut self.tokens {
            tokens.decide(now, TokenEvent::Tick);
            tokens.take_decisions(None, actions);
        }
    }

    /// Returns the time at which the token core decides again.
    pub(super) fn tokens_wake(&self) -> Option<Timestamp> {
        self.tokens.as_ref()?.core.next_wake()
    }

    /// Returns the SMs of the last token of the request's seat; `None` without a token.
    #[must_use]
    pub fn sms_of(&self, key: millrace_core::ids::RequestKey) -> Option<SmShare> {
        let place = self.lines.place_of(key)?;
        self.tokens.as_ref()?.period(self.lines.seat(place))?.on
    }
}
