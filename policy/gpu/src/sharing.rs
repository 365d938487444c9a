//! The sharing of a GPU: when it begins and ends, and which seats have tokens.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_core::SEATS_MAX;
use millrace_core::ids::{RequestKey, RunId};
use millrace_slices::tokens::{Config, Event as TokenEvent, TokenId};
use millrace_types::{SliceCompute, SliceId, SmShare, Timestamp};

use super::executor_seat::{ExecutorSeat, RunTokens};
use super::gpu_core::GpuCore;
use super::lines::LinePlace;
use super::protocol::{Action, SmUse};
use super::seat_tokens::{SeatTokens, TokenHold};
use super::slice_use::SliceUse;

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
        self.tokens = self.sharing.map(|config| {
            let mut tokens = SeatTokens::new(config, last_period, now);
            tokens.set_slices(now, &self.slices);
            tokens
        });
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

    /// Sets the slices of the GPU.
    pub(super) fn set_slices(
        &mut self,
        now: Timestamp,
        slices: BTreeMap<SliceId, SliceCompute>,
        actions: &mut Vec<Action>,
    ) {
        self.slices = slices;
        if let Some(tokens) = &mut self.tokens {
            tokens.set_slices(now, &self.slices);
            tokens.take_decisions(None, actions);
        }
    }

    /// Returns the use of the GPU's slices since the GPU has been shared.
    pub fn slice_uses(&self, now: Timestamp) -> impl Iterator<Item = (SliceId, SliceUse)> {
        self.tokens.iter().flat_map(move |tokens| tokens.uses(now))
    }

    /// Returns whether a seat of the executor holds a token.
    pub(super) fn token_hold(&self, seat: ExecutorSeat) -> TokenHold {
        self.tokens.as_ref().map_or(TokenHold::Unneeded, |tokens| tokens.hold(seat))
    }

    /// Returns how a run that is about to be sent comes by its tokens; `None` if the GPU is not shared.
    pub(super) fn tokens_for(
        &mut self,
        now: Timestamp,
        place: LinePlace,
        actions: &mut Vec<Action>,
    ) -> Option<RunTokens> {
        let request = self.lines.get(place)?;
        let deadline = request.deadline;
        let right = request.right;
        let seat = self.lines.seat(place);
        let sent = self.lines.sent_runs(seat);
        let tokens = self.tokens.as_mut()?;
        // A run ahead that waits for weights has no period now, and will ask for one.
        if sent > 1 {
            return Some(RunTokens { anew: false, first: None });
        }
        tokens.ask(now, seat, right, deadline);
        let first = tokens.take_decisions(Some(seat), actions);
        Some(RunTokens { anew: true, first })
    }

    /// Handles the wish of a seat for a token.
    pub(super) fn token_asked(&mut self, now: Timestamp, seat: ExecutorSeat, actions: &mut Vec<Action>) {
        let Some(line) = self.lines.line_of(seat) else { return };
        let head = self.lines.get(LinePlace::first_in(line)).filter(|head| head.run().is_some());
        let Some((tokens, head)) = self.tokens.as_mut().zip(head) else { return };
        tokens.ask(now, seat, head.right, head.deadline);
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

    /// Gives back the token that a seat holds after the end of its last run. Returns the SMs of the run.
    pub(super) fn token_after_run(
        &mut self,
        now: Timestamp,
        run: RunId,
        token: Option<(TokenId, Duration)>,
        actions: &mut Vec<Action>,
    ) -> Option<SmUse> {
        let place = self.lines.place_of_run(run)?;
        let seat = self.lines.seat(place);
        if let Some((token, busy)) = token
            && self.lines.sent_runs(seat) == 1
        {
            self.token_spent(now, seat, token, busy, false, actions);
        }
        self.tokens.as_ref()?.sms_used(seat)
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
        self.tokens.as_ref()?.next_wake()
    }

    /// Returns the SMs of the last token of the request's seat; `None` without a token.
    #[must_use]
    pub fn sms_of(&self, key: RequestKey) -> Option<SmShare> {
        let place = self.lines.place_of(key)?;
        self.tokens.as_ref()?.period(self.lines.seat(place))?.on
    }
}
