//! The tokens of a shared GPU's seats. The token core decides which seat may launch on which SMs; this
//! module tells the core which seats have runs, and the executor what the core decides.
//!
//! A seat's *period* lasts while the seat has runs in the executor. The runs of a period use the seat's
//! tokens one after another. A period ends early if a run waits for weights: the seat then gives its tokens
//! back, and asks again once the weights are there.
//!
//! A run of a slice has the curve of the slice's model, as far as the model was profiled. Other runs are assumed
//! to be as fast as their share of the SMs is large: a lone run then has the whole GPU, and runs at the same time
//! have about equal parts.
//!
//! The runs of a slice's seat are charged to the slice, those of a trial to the *trial slice*, and all others to
//! the *free slice*, which has no limit and no request. A slice that is removed stays until its runs have ended.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_core::SEATS_MAX;
use millrace_slices::gate::SeatToken;
use millrace_slices::tokens::{
    Action as TokenAction, Config, Event as TokenEvent, TokenCore, TokenHolder, TokenId,
};
use millrace_types::profile::TrialSetting;
use millrace_types::slices::UNITS;
use millrace_types::{ComputeCurve, Permille, SliceCompute, SliceId, SmShare, Terms, Timestamp};

use super::executor_seat::ExecutorSeat;
use super::protocol::{Action, ComputeRight, SmUse};
use super::slice_use::{SliceUse, SliceUseRecord};

/// The guaranteed time that a slice may lack at the end of a second before the second counts as starved: the
/// balance of a slice with long launches swings by half of a launch.
const MISSED_MIN: Duration = Duration::from_millis(50);

/// The slice of all requests without a slice of their own: on any of the SMs, at any time.
const FREE_SLICE: SliceId = SliceId(0);

/// The slice of the GPU's trial. A second trial at the same time would have the terms of the later.
const TRIAL_SLICE: SliceId = SliceId(u64::MAX);

/// Returns the terms of a trial. No time is guaranteed, so that no slice waits for a trial.
fn trial_terms(setting: TrialSetting) -> Terms {
    let share = Permille::new(u16::from(setting.units()) * 1000 / u16::from(UNITS)).unwrap_or(Permille::ALL);
    Terms::new(share, share, Permille::ZERO, setting.quota())
        .expect("neither the share nor the quota is zero")
}

fn free_terms() -> Terms {
    // 6% of the SMs: a single unit.
    let least = Permille::new(60).unwrap_or(Permille::ALL);
    Terms::new(least, Permille::ALL, Permille::ZERO, Permille::ALL).expect("the least share is above zero")
}

/// A period of a seat.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeatPeriod {
    number: u64,
    /// The last token that was granted before the period began.
    after: Option<TokenId>,
    /// The SMs of the last token.
    pub(super) on: Option<SmShare>,
    slice: SliceId,
}

/// Whether a seat holds a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenHold {
    /// The seat's runs need no token now: the GPU is not shared, or the run waits for weights.
    Unneeded,
    /// The seat waits for a token.
    Awaited,
    /// The seat has held its present token since this time.
    Since(Timestamp),
}

/// The tokens of all seats of a GPU.
#[derive(Debug)]
pub(super) struct SeatTokens {
    pub(super) config: Config,
    core: TokenCore,
    periods: [Option<SeatPeriod>; SEATS_MAX],
    /// The SMs of the present or last period of each seat, and whether no other seat had a period meanwhile.
    used: [Option<SmShare>; SEATS_MAX],
    alone: [bool; SEATS_MAX],
    pub(super) last_period: u64,
    last_token: Option<TokenId>,
    /// The compute of each slice, also of slices that leave.
    slices: BTreeMap<SliceId, SliceCompute>,
    /// Slices that were removed while they had runs.
    leaving: BTreeSet<SliceId>,
    uses: BTreeMap<SliceId, SliceUseRecord>,
    /// Actions of the token core in the present step.
    decided: Vec<TokenAction>,
}

impl SeatTokens {
    /// Returns the tokens of a GPU without runs. Numbers of periods continue after `last_period`.
    pub(super) fn new(config: Config, last_period: u64, now: Timestamp) -> Self {
        let mut core = TokenCore::new(config);
        core.on_event(now, TokenEvent::Terms { slice: FREE_SLICE, terms: free_terms() }, &mut Vec::new());
        Self {
            config,
            core,
            periods: [None; SEATS_MAX],
            used: [None; SEATS_MAX],
            alone: [true; SEATS_MAX],
            last_period,
            last_token: None,
            slices: BTreeMap::new(),
            leaving: BTreeSet::new(),
            uses: BTreeMap::new(),
            decided: Vec::new(),
        }
    }

    /// Sets all slices. New terms hold from a slice's next token on, and a new curve from its next run on.
    pub(super) fn set_slices(&mut self, now: Timestamp, wanted: &BTreeMap<SliceId, SliceCompute>) {
        for (&slice, &compute) in wanted {
            self.leaving.remove(&slice);
            self.set_slice(now, slice, compute);
        }
        let gone = self.slices.keys().filter(|slice| !wanted.contains_key(slice)).copied();
        let gone: Vec<_> = gone.filter(|&slice| slice != TRIAL_SLICE).collect();
        self.leaving.extend(gone);
        self.drop_left(now);
    }

    fn set_slice(&mut self, now: Timestamp, slice: SliceId, compute: SliceCompute) {
        let terms = compute.terms;
        if self.slices.insert(slice, compute).map(|before| before.terms) != Some(terms) {
            self.decide(now, TokenEvent::Terms { slice, terms });
        }
    }

    /// Removes slices that leave and have no runs any longer.
    fn drop_left(&mut self, now: Timestamp) {
        if self.leaving.is_empty() {
            return;
        }
        let used = |slice: &SliceId| self.periods.iter().flatten().any(|period| period.slice == *slice);
        let left: Vec<_> = self.leaving.iter().copied().filter(|slice| !used(slice)).collect();
        for slice in left {
            self.leaving.remove(&slice);
            self.slices.remove(&slice);
            self.uses.remove(&slice);
            self.decide(now, TokenEvent::Gone { slice });
        }
    }

    /// Returns the compute of each slice.
    #[cfg(test)]
    pub(super) fn slices(&self) -> &BTreeMap<SliceId, SliceCompute> {
        &self.slices
    }

    /// Returns the use of each slice.
    pub(super) fn uses(&self, now: Timestamp) -> impl Iterator<Item = (SliceId, SliceUse)> {
        self.slices.keys().filter(|&&slice| slice != TRIAL_SLICE).map(move |slice| {
            let used = self.uses.get(slice).map(|record| record.until(now)).unwrap_or_default();
            (*slice, used)
        })
    }

    /// Returns whether a seat holds a token.
    pub(super) fn hold(&self, seat: ExecutorSeat) -> TokenHold {
        let Some(period) = self.period(seat) else { return TokenHold::Unneeded };
        self.core.held_since(TokenHolder(period.number)).map_or(TokenHold::Awaited, TokenHold::Since)
    }

    /// Whether no seat has a period or a token.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.periods.iter().all(Option::is_none) && self.core.is_idle()
    }

    pub(super) fn period(&self, seat: ExecutorSeat) -> Option<SeatPeriod> {
        self.periods.get(usize::from(seat.0)).copied().flatten()
    }

    /// Returns the SMs of the present or last period of a seat.
    pub(super) fn sms_used(&self, seat: ExecutorSeat) -> Option<SmUse> {
        let seat = usize::from(seat.0);
        let sms = self.used.get(seat).copied().flatten()?;
        Some(SmUse { sms, alone: self.alone.get(seat).copied().unwrap_or(false) })
    }

    pub(super) fn decide(&mut self, now: Timestamp, event: TokenEvent) {
        self.core.on_event(now, event, &mut self.decided);
    }

    /// Tells the core that a seat wants a token. Returns whether a period of the seat begins.
    pub(super) fn ask(
        &mut self,
        now: Timestamp,
        seat: ExecutorSeat,
        right: ComputeRight,
        deadline: Option<Timestamp>,
    ) -> bool {
        let before = self.period(seat);
        let period = before.unwrap_or_else(|| {
            self.used[usize::from(seat.0)] = None;
            self.alone[usize::from(seat.0)] = self.periods.iter().all(Option::is_none);
            for (alone, period) in self.alone.iter_mut().zip(&self.periods) {
                *alone &= period.is_none();
            }
            let slice = match right {
                ComputeRight::Slice(slice) if self.slices.contains_key(&slice) => slice,
                ComputeRight::Slice(_) | ComputeRight::Free => FREE_SLICE,
                ComputeRight::Trial(setting) => self.trial_slice(now, setting),
            };
            SeatPeriod { number: self.last_period + 1, after: self.last_token, on: None, slice }
        });
        self.last_period = self.last_period.max(period.number);
        self.periods[usize::from(seat.0)] = Some(period);
        let SeatPeriod { number, slice, .. } = period;
        let run = TokenHolder(number);
        let curve = self.slices.get(&slice).map_or(ComputeCurve::PROPORTIONAL, |compute| compute.curve);
        self.decide(now, TokenEvent::Ask { slice, run, deadline, curve });
        before.is_none()
    }

    /// Gives the trial slice these terms. The slice stays after a run, because its account decides when the next
    /// request of the trial may compute.
    fn trial_slice(&mut self, now: Timestamp, setting: TrialSetting) -> SliceId {
        // A trial has a single width, so the curve has no effect.
        self.set_slice(now, TRIAL_SLICE, SliceCompute::unmeasured(trial_terms(setting)));
        TRIAL_SLICE
    }

    /// Ends the period of a seat that has no runs any longer.
    pub(super) fn end(&mut self, now: Timestamp, seat: ExecutorSeat) {
        if let Some(period) = self.periods[usize::from(seat.0)].take() {
            self.decide(now, TokenEvent::Left { run: TokenHolder(period.number) });
            self.drop_left(now);
        }
    }

    pub(super) fn spent(
        &mut self,
        now: Timestamp,
        seat: ExecutorSeat,
        token: TokenId,
        busy: Duration,
        more: bool,
    ) {
        let Some(period) = self.period(seat).filter(|period| period.after.is_none_or(|last| token > last))
        else {
            return;
        };
        self.decide(now, TokenEvent::Spent { run: TokenHolder(period.number), token, busy, more });
        let sample = self.decided.iter().find_map(|action| match *action {
            TokenAction::Sample { run, on, busy, .. } if run.0 == period.number => Some((on, busy)),
            _ => None,
        });
        if let Some((on, busy)) = sample.filter(|_| ![FREE_SLICE, TRIAL_SLICE].contains(&period.slice)) {
            self.uses.entry(period.slice).or_default().add(now, on, busy);
        }
        if !more {
            self.periods[usize::from(seat.0)] = None;
            self.drop_left(now);
        }
    }

    /// Returns the decisions of the core as actions. The first token of `begun`, a seat whose run is about to
    /// be sent, is returned apart.
    pub(super) fn take_decisions(
        &mut self,
        begun: Option<ExecutorSeat>,
        actions: &mut Vec<Action>,
    ) -> Option<SeatToken> {
        let mut first = None;
        for decision in std::mem::take(&mut self.decided) {
            match decision {
                TokenAction::Grant { run, token, on, busy } => {
                    self.last_token = self.last_token.max(Some(token));
                    let Some(seat) = self.seat_of(run) else { continue };
                    if let Some(period) = &mut self.periods[usize::from(seat.0)] {
                        period.on = Some(on);
                    }
                    self.used[usize::from(seat.0)] = Some(on);
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
                TokenAction::Starved { slice, missed } if missed > MISSED_MIN => {
                    self.uses.entry(slice).or_default().starved();
                }
                TokenAction::Starved { .. } | TokenAction::Sample { .. } => {}
            }
        }
        first
    }

    /// Returns the time at which the token core decides again.
    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        self.core.next_wake()
    }

    fn seat_of(&self, run: TokenHolder) -> Option<ExecutorSeat> {
        let of = |period: &Option<SeatPeriod>| period.is_some_and(|period| period.number == run.0);
        (0..).map(ExecutorSeat).zip(&self.periods).find(|(_, period)| of(period)).map(|(seat, _)| seat)
    }
}
