//! Decides which run of a GPU may launch, on which SMs and for how long. A run launches only under a token, and
//! asks for the next token while the present one lasts.
//!
//! ```text
//! executor ─ Ask, Spent ─► TokenCore ─ Grant ─► executor launches on the SMs of the token
//! planner  ─ Terms, Gone ─►    │      ─ Shorten, Withdraw ─► another run wants the SMs
//!                              └─ Starved, Sample ─► events, profiles
//! ```
//!
//! A slice's *request* is the share of device time that its terms guarantee while the slice wants to run, and
//! its *limit* is the share that it does not exceed. Neither is an inference request. A *run* is whatever holds
//! tokens: on a GPU, a period of a seat, in which several inference requests may run.
//!
//! **Order of service** ([`TokenOrder::Skip`]). Slices that miss a part of their request go first, the largest gap
//! before the others; then runs by deadline; then the slice, and of a slice the run, that was served least. A run
//! is skipped if its SMs are not free; while a run of a slice that misses time waits, only such runs get units,
//! because else a wide slice would never find all of its units free. After an age, a skipped run goes first and
//! no run passes it, so no run starves. Units that are left widen the runs that gain most, up to the greatest share
//! of their terms.
//! [`TokenOrder::Head`] is the paper's order instead (F10, F11).
//!
//! **Amounts.** A token is worth a few milliseconds of device time. A run that is alone on the GPU gets a token
//! without an end, or one for all that its limit leaves (F12); the first other run shortens that token. So a
//! single run without a limit exchanges no messages while it is alone.
//!
//! **Ahead.** A run that holds a token may be granted the next token early, on the same SMs. That does not happen
//! while a run that is earlier in the order of service waits for units, or while any run waits for units and the
//! holder has more than its least SMs. The next token is withdrawn as soon as one of these holds.
//!
//! **Bounds.** A run holds at most one token and one token ahead. A slice exceeds its limit by at most one token
//! for each of its runs (F09). The caller bounds the number of slices and runs.
//!
//! **Batches of events.** Tokens that end at the same time are reported together
//! ([`on_events`](TokenCore::on_events)), because the decision depends on all of them.

mod account;
mod grant;
mod protocol;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{ComputeCurve, Permille, SliceId, SmShare, Terms, Timestamp};

use self::account::{Account, Picos, picos, time_of};
pub use self::protocol::{
    Action, Config, ConfigError, Event, PERIOD_MAX, QuotaCap, TOKEN_MAX, TOKEN_MIN, TokenHolder, TokenId,
    TokenOrder,
};
use crate::units::UnitPool;

/// A token that is out.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Token {
    id: TokenId,
    on: SmShare,
    /// The time from which the token may be used.
    begun: Timestamp,
    /// The time from which the token counts in the present window.
    counted_from: Timestamp,
    /// Device time of the token; `None` for an open token.
    length: Option<Duration>,
    /// Amount that the slice's account was charged for the token.
    charged: Picos,
    /// Whether no other run has held a token since this one was granted.
    alone: bool,
    withdrawn: bool,
}

impl Token {
    /// Returns the part of a device time that counts in the present window. The part before the window is not
    /// known; as much as possible counts.
    fn counted(&self, busy: Duration, now: Timestamp) -> Duration {
        if self.counted_from > self.begun { busy.min(now.since(self.counted_from)) } else { busy }
    }

    /// Returns the device time that is left, if the token was used from its beginning on.
    fn rest(&self, now: Timestamp) -> Duration {
        self.length.map_or(Duration::ZERO, |length| length.saturating_sub(now.since(self.begun)))
    }
}

/// A run that wants or holds a token.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    slice: SliceId,
    deadline: Option<Timestamp>,
    curve: ComputeCurve,
    wants: bool,
    /// The time since which the run has been passed over while its slice was below its limit.
    skipped_since: Option<Timestamp>,
    present: Option<Token>,
    ahead: Option<Token>,
    /// Device time so far.
    served: Duration,
}

impl Run {
    fn waits(&self) -> bool {
        self.wants && self.present.is_none()
    }
}

/// The tokens of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenCore {
    config: Config,
    pool: UnitPool,
    slices: BTreeMap<SliceId, Account>,
    runs: BTreeMap<TokenHolder, Run>,
    now: Timestamp,
    next_token: u64,
    /// The run that was served last, for turns.
    last: Option<(SliceId, TokenHolder)>,
}

impl TokenCore {
    /// Creates the core of a GPU without slices.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let pool = match config.order() {
            TokenOrder::All => UnitPool::unbounded(),
            TokenOrder::Head | TokenOrder::Skip { .. } | TokenOrder::Turns => UnitPool::new(config.grid()),
        };
        Self {
            config,
            pool,
            slices: BTreeMap::new(),
            runs: BTreeMap::new(),
            now: Timestamp::ZERO,
            next_token: 0,
            last: None,
        }
    }

    /// Handles an event, and appends the resulting actions.
    pub fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.on_events(now, [event], actions);
    }

    /// Handles events of the same time, and appends the resulting actions. Tokens are granted after the last
    /// event. The caller's time never goes back.
    pub fn on_events(
        &mut self,
        now: Timestamp,
        events: impl IntoIterator<Item = Event>,
        actions: &mut Vec<Action>,
    ) {
        self.advance(now, actions);
        for event in events {
            self.apply(now, event, actions);
        }
        self.bound_tokens(now, actions);
        self.grant(now, actions);
    }

    /// Returns the time by which the caller has to send a [`Event::Tick`]: a run waits, and its slice will then
    /// be below its limit again.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        let waiting = self.runs.values().filter(|run| run.waits());
        let accounts = waiting.filter_map(|run| self.slices.get(&run.slice));
        let at_limit = accounts.filter(|account| !account.below_limit(self.config.cap()));
        at_limit.map(|account| self.below_limit_at(account)).min()
    }

    fn below_limit_at(&self, account: &Account) -> Timestamp {
        match self.config.cap() {
            QuotaCap::Window(window) => self.period_start(self.now) + window,
            QuotaCap::Bucket(_) => self.now + account.refill(),
        }
    }

    /// Whether no token is out and no run wants one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && self.pool.is_free()
    }

    /// Returns the time since which a run has held its present token; `None` without a token.
    #[must_use]
    pub fn held_since(&self, run: TokenHolder) -> Option<Timestamp> {
        Some(self.runs.get(&run)?.present.as_ref()?.begun)
    }

    /// Returns the shortfall of the slice at the end of the last period; zero if the slice did not want to run
    /// during all of that period.
    #[must_use]
    pub fn missed(&self, slice: SliceId) -> Duration {
        self.slices.get(&slice).map_or(Duration::ZERO, |account| time_of(account.missed()))
    }

    fn period_start(&self, at: Timestamp) -> Timestamp {
        let period = self.config.cap().period().as_nanos() as u64;
        Timestamp(at.as_nanos() / period * period)
    }

    /// Credits all accounts, and ends a period.
    fn advance(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let cap = self.config.cap();
        let elapsed = now.since(self.now);
        self.slices.values_mut().for_each(|account| account.credit(elapsed, cap));
        let boundary = self.period_start(now);
        if boundary > self.period_start(self.now) {
            self.end_period(boundary, actions);
        }
        self.now = self.now.max(now);
    }

    /// Sets used time to zero (F02), except for the rest of tokens that are out, and reports starved slices.
    fn end_period(&mut self, boundary: Timestamp, actions: &mut Vec<Action>) {
        let cap = self.config.cap();
        self.charge_open_tokens(boundary);
        let mut carried: BTreeMap<SliceId, Picos> = BTreeMap::new();
        if matches!(cap, QuotaCap::Window(_)) {
            for run in self.runs.values_mut() {
                let sum = carried.entry(run.slice).or_default();
                if let Some(present) = &mut run.present {
                    present.charged = picos(present.rest(boundary));
                    present.counted_from = boundary;
                    *sum += present.charged;
                }
                // A token ahead has not begun, and keeps its charge.
                *sum += run.ahead.as_ref().map_or(0, |ahead| ahead.charged);
            }
        }
        for (slice, account) in &mut self.slices {
            let missed = account.end_period(boundary, cap, carried.get(slice).copied().unwrap_or(0));
            if missed > picos(self.config.token()) {
                actions.push(Action::Starved { slice: *slice, missed: time_of(missed) });
            }
        }
    }

    /// Charges open tokens for the time until now. Nothing was charged when they were granted.
    fn charge_open_tokens(&mut self, now: Timestamp) {
        for run in self.runs.values_mut() {
            let Some(token) = run.present.as_mut().filter(|token| token.length.is_none()) else { continue };
            let charge = picos(now.since(token.counted_from));
            if let Some(account) = self.slices.get_mut(&run.slice) {
                account.charge(charge - token.charged);
            }
            token.charged = charge;
        }
    }

    fn apply(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Terms { slice, terms } => self.set_terms(slice, terms),
            Event::Gone { slice } => self.remove_slice(slice),
            Event::Ask { slice, run, deadline, curve } => self.ask(now, slice, run, deadline, curve),
            Event::Spent { run, token, busy, more } => self.spent(now, run, token, busy, more, actions),
            Event::Left { run } => self.left(now, run),
            Event::Tick => {}
        }
    }

    fn set_terms(&mut self, slice: SliceId, terms: Terms) {
        let config = self.config;
        self.slices
            .entry(slice)
            .and_modify(|account| account.change(terms, config.grid(), config.cap()))
            .or_insert_with(|| Account::new(terms, &config));
    }

    /// Removes a slice and its waiting runs. Runs that hold a token stay until the token ends.
    fn remove_slice(&mut self, slice: SliceId) {
        self.slices.remove(&slice);
        self.runs.retain(|_, run| run.slice != slice || run.present.is_some());
        for run in self.runs.values_mut().filter(|run| run.slice == slice) {
            run.wants = false;
        }
    }

    fn ask(
        &mut self,
        now: Timestamp,
        slice: SliceId,
        run: TokenHolder,
        deadline: Option<Timestamp>,
        curve: ComputeCurve,
    ) {
        let Some(account) = self.slices.get_mut(&slice) else { return };
        let known = self.runs.entry(run).or_insert_with(|| {
            account.add_run(now);
            let served = Duration::ZERO;
            Run {
                slice,
                deadline,
                curve,
                wants: true,
                skipped_since: None,
                present: None,
                ahead: None,
                served,
            }
        });
        known.deadline = deadline;
        known.curve = curve;
        known.wants = known.ahead.is_none();
    }

    fn spent(
        &mut self,
        now: Timestamp,
        id: TokenHolder,
        token: TokenId,
        busy: Duration,
        more: bool,
        actions: &mut Vec<Action>,
    ) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let is = |it: &Option<Token>| it.as_ref().is_some_and(|it| it.id == token);
        let was_present = is(&run.present);
        let ended = match (was_present, is(&run.ahead)) {
            (true, _) => std::mem::replace(&mut run.present, run.ahead.take()),
            (false, true) => run.ahead.take(),
            (false, false) => None,
        };
        let Some(ended) = ended else { return };
        if was_present && let Some(begins) = &mut run.present {
            begins.begun = now;
            begins.counted_from = now;
        }
        // A token ahead answers the wish already.
        run.wants = more && (!was_present || run.present.is_none());
        run.served = run.served.saturating_add(busy);
        let slice = run.slice;
        self.settle(now, slice, &ended, busy);
        if !busy.is_zero() {
            actions.push(Action::Sample { run: id, on: ended.on, busy, alone: ended.alone });
        }
        self.release(now, id, &ended, more || !was_present);
    }

    /// Corrects the charge of a token that ended.
    fn settle(&mut self, now: Timestamp, slice: SliceId, ended: &Token, busy: Duration) {
        let Some(account) = self.slices.get_mut(&slice) else { return };
        account.charge(picos(ended.counted(busy, now)) - ended.charged);
        account.settle(busy, self.config.token());
    }

    /// Puts the units of a token back unless the run continues on them, and removes a run that is done or has
    /// lost its slice.
    fn release(&mut self, now: Timestamp, id: TokenHolder, ended: &Token, more: bool) {
        let Some(run) = self.runs.get(&id) else { return };
        let holds = run.present.is_some();
        let gone = !self.slices.contains_key(&run.slice);
        if !holds {
            self.pool.put_back(ended.on);
        }
        if !more || (gone && !holds) {
            self.left(now, id);
        }
    }

    /// Removes a run, and puts back its tokens.
    fn left(&mut self, now: Timestamp, id: TokenHolder) {
        let Some(run) = self.runs.remove(&id) else { return };
        if let Some(present) = &run.present {
            self.pool.put_back(present.on);
            // The device time is not known: the run may have computed all the time.
            let elapsed = now.since(present.begun);
            let busy = present.length.map_or(elapsed, |length| length.min(elapsed));
            self.settle(now, run.slice, present, busy);
        }
        if let Some(ahead) = &run.ahead {
            self.settle(now, run.slice, ahead, Duration::ZERO);
        }
        if let Some(account) = self.slices.get_mut(&run.slice) {
            account.remove_run(now);
        }
    }

    /// Gives an end to open and long tokens, if another run wants the units or the slice has a limit now.
    fn bound_tokens(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let shared = self.runs.len() > 1;
        let unit = self.config.token();
        for (id, run) in &mut self.runs {
            let account = self.slices.get_mut(&run.slice);
            let limited = account.as_ref().is_none_or(|it| it.terms.limit() != Permille::ALL);
            let Some(token) = &mut run.present else { continue };
            let long = token.length.is_none_or(|length| length > unit);
            if !long || !(shared || (limited && token.length.is_none())) {
                continue;
            }
            let busy = whole_tokens(now.since(token.begun), unit);
            if token.length.is_some_and(|length| length <= busy) {
                continue;
            }
            token.length = Some(busy);
            let before = token.counted_from.since(token.begun);
            let charge = picos(busy.saturating_sub(before));
            if let Some(account) = account {
                account.charge(charge - token.charged);
            }
            token.charged = charge;
            actions.push(Action::Shorten { run: *id, token: token.id, busy });
        }
    }
}

/// Returns a time rounded up to whole tokens, at least one.
fn whole_tokens(elapsed: Duration, token: Duration) -> Duration {
    let count = elapsed.as_nanos().div_ceil(token.as_nanos()).max(1);
    token.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;
