//! Granting: which of the waiting runs get the free units.

use std::cmp::Reverse;
use std::time::Duration;

use millrace_types::{Permille, SliceId, SmShare, Timestamp};

use super::account::{Account, Picos, picos, time_of};
use super::protocol::{Action, QuotaCap, TokenHolder, TokenId, TokenOrder};
use super::{Run, Token, TokenCore};

/// Least gain in speed for which a run is widened.
const GAIN_MIN: f64 = 1.05;

/// A run in the order of service. Fields in the order of comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: Class,
    key: i64,
    wider_first: Reverse<u8>,
    slice: SliceId,
    deadline: Timestamp,
    /// Device time of the run so far: of the runs of a slice, the run that was served least goes first.
    served: Duration,
    run: TokenHolder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// Skipped for too long; the key is the time since which.
    Aged,
    /// By the gap, largest first; the key is the negative gap.
    Owed,
    /// By deadline; the key is the deadline.
    Due,
    /// By the time served, least first; the key is the time.
    Idle,
}

/// A pass over the waiting runs.
#[derive(Debug, Default)]
struct Pass {
    /// Runs that got a token from scratch, and may be widened.
    granted: Vec<TokenHolder>,
    /// Tokens granted ahead.
    ahead: Vec<TokenHolder>,
    /// Whether a run waits for units that a later run must not be promised.
    blocked: bool,
    /// Whether any run waits for units, so that no run may keep more units than the least of its terms.
    crowded: bool,
    /// Whether a run that is owed time waits for units, so that runs that are owed nothing get none.
    owed_waits: bool,
    /// Whether no later run gets free units.
    stopped: bool,
}

impl TokenCore {
    pub(super) fn grant(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let mut pass = Pass::default();
        match self.config.order() {
            TokenOrder::Head | TokenOrder::Skip { .. } => self.serve_line(now, &mut pass, actions),
            TokenOrder::Turns => self.serve_turn(now, &mut pass),
            TokenOrder::All => self.serve_all(now, &mut pass),
        }
        if !pass.stopped && !pass.owed_waits {
            self.widen(&pass.granted);
        }
        self.note_company();
        for id in pass.granted {
            let token = self.runs.get(&id).and_then(|run| run.present.as_ref());
            actions.extend(token.map(|token| grant_of(id, token)));
        }
        for id in pass.ahead {
            let token = self.runs.get(&id).and_then(|run| run.ahead.as_ref());
            actions.extend(token.map(|token| grant_of(id, token)));
        }
    }

    /// Serves the runs in the order of their ranks.
    fn serve_line(&mut self, now: Timestamp, pass: &mut Pass, actions: &mut Vec<Action>) {
        let mut line = self.line(now);
        line.sort_unstable();
        pass.crowded = self.is_crowded();
        let mut later = Vec::new();
        for rank in line {
            // An earlier run of the same slice may have taken the time that the slice was owed.
            let now_rank = self.runs.get(&rank.run).and_then(|run| self.rank(now, rank.run, run));
            match now_rank {
                Some(fresh) if fresh.class > rank.class => later.push(fresh),
                _ => self.serve(now, rank, pass, actions),
            }
        }
        later.sort_unstable();
        for rank in later {
            self.serve(now, rank, pass, actions);
        }
    }

    /// Returns the runs that want a token or have a token ahead.
    fn line(&mut self, now: Timestamp) -> Vec<Rank> {
        let cap = self.config.cap();
        for run in self.runs.values_mut() {
            let eligible = self.slices.get(&run.slice).is_some_and(|account| account.below_limit(cap));
            if !eligible || !run.waits() {
                run.skipped_since = None;
            }
        }
        let wanting = self.runs.iter().filter(|(_, run)| run.wants || run.ahead.is_some());
        wanting.filter_map(|(id, run)| self.rank(now, *id, run)).collect()
    }

    fn rank(&self, now: Timestamp, id: TokenHolder, run: &Run) -> Option<Rank> {
        let account = self.slices.get(&run.slice)?;
        // Without the charge of the token ahead: else the promise would lower the run's own rank, and the token
        // would be withdrawn and promised again without end.
        let promised = run.ahead.as_ref().map_or(0, |ahead| ahead.charged);
        let gap = account.gap(self.config.cap()) + promised;
        let wider_first = Reverse(account.least);
        let deadline = run.deadline.unwrap_or(Timestamp::MAX);
        let Run { slice, served, .. } = *run;
        let at = |class, key| Rank { class, key, wider_first, slice, deadline, served, run: id };
        let aged = |age| run.skipped_since.filter(|since| now.since(*since) > age);
        Some(match self.config.order() {
            TokenOrder::Skip { age } => match (aged(age), run.deadline) {
                (Some(since), _) => at(Class::Aged, key_of(since)),
                _ if gap > 0 => at(Class::Owed, -gap),
                (None, Some(due)) => at(Class::Due, key_of(due)),
                (None, None) => at(Class::Idle, picos(account.served)),
            },
            TokenOrder::Head | TokenOrder::Turns | TokenOrder::All => at(Class::Owed, -gap),
        })
    }

    /// Serves a run: a token if its units are free, or a token ahead, or the withdrawal of one.
    fn serve(&mut self, now: Timestamp, rank: Rank, pass: &mut Pass, actions: &mut Vec<Action>) {
        let Some(run) = self.runs.get(&rank.run) else { return };
        let Some(account) = self.slices.get(&run.slice) else { return };
        let below_limit = account.below_limit(self.config.cap());
        if let Some(present) = &run.present {
            let withheld = pass.blocked || (pass.crowded && present.on.units() > account.least);
            self.serve_holder(now, rank.run, below_limit, withheld, pass, actions);
        } else if below_limit && run.wants {
            let least = account.least;
            let withheld = pass.stopped || (pass.owed_waits && rank.class > Class::Owed);
            let on = if withheld { None } else { self.pool.take(least) };
            match on {
                Some(on) => {
                    self.start(now, rank.run, on);
                    pass.granted.push(rank.run);
                }
                None => self.skip(now, rank, pass),
            }
        }
    }

    /// Whether a run below its limit waits although its least units are not free.
    fn is_crowded(&self) -> bool {
        let cap = self.config.cap();
        self.runs.values().filter(|run| run.waits()).any(|run| {
            self.slices.get(&run.slice).is_some_and(|account| {
                account.below_limit(cap) && self.pool.clone().take(account.least).is_none()
            })
        })
    }

    fn skip(&mut self, now: Timestamp, rank: Rank, pass: &mut Pass) {
        if let Some(run) = self.runs.get_mut(&rank.run) {
            run.skipped_since.get_or_insert(now);
        }
        pass.blocked = true;
        pass.owed_waits |= rank.class == Class::Owed;
        pass.stopped |= rank.class == Class::Aged || self.config.order() == TokenOrder::Head;
    }

    /// Grants the next token to a run that holds one, or takes it back.
    fn serve_holder(
        &mut self,
        now: Timestamp,
        id: TokenHolder,
        below_limit: bool,
        withheld: bool,
        pass: &mut Pass,
        actions: &mut Vec<Action>,
    ) {
        if withheld {
            let ahead = self.runs.get_mut(&id).and_then(|run| run.ahead.as_mut());
            if let Some(ahead) = ahead.filter(|ahead| !ahead.withdrawn) {
                ahead.withdrawn = true;
                actions.push(Action::Withdraw { run: id, token: ahead.id });
            }
        } else if below_limit && let Some(on) = self.ahead_on(id) {
            let length = self.config.token();
            let token = self.token(now, on, Some(length));
            self.charge(id, token.charged);
            if let Some(run) = self.runs.get_mut(&id) {
                run.wants = false;
                run.ahead = Some(token);
                pass.ahead.push(id);
            }
        }
    }

    /// Returns the SMs on which a run may continue. `None` if the run wants no token, or should get other SMs.
    fn ahead_on(&self, id: TokenHolder) -> Option<SmShare> {
        let run = self.runs.get(&id).filter(|run| run.wants && run.ahead.is_none())?;
        let present = run.present.as_ref().filter(|present| present.length.is_some())?;
        let account = self.slices.get(&run.slice)?;
        let units = present.on.units();
        let in_terms = (account.least..=account.most).contains(&units);
        let may_widen = self.wider(run, account, units).is_some_and(|(wide, _)| {
            let mut pool = self.pool.clone();
            pool.exchange(present.on, wide).is_some()
        });
        (in_terms && !may_widen).then_some(present.on)
    }

    /// Serves one run at a time, in turn.
    fn serve_turn(&mut self, now: Timestamp, pass: &mut Pass) {
        if self.runs.values().any(|run| run.present.is_some()) {
            return;
        }
        let mut waiting = self.eligible();
        waiting.sort_unstable();
        let after = waiting.iter().find(|turn| self.last.is_none_or(|last| **turn > last));
        let Some(&(slice, id)) = after.or(waiting.first()) else { return };
        let Some(account) = self.slices.get(&slice) else { return };
        if let Some(on) = self.pool.take(account.least) {
            self.last = Some((slice, id));
            self.start(now, id, on);
            pass.granted.push(id);
        }
    }

    /// Serves all runs at once.
    fn serve_all(&mut self, now: Timestamp, pass: &mut Pass) {
        for (slice, id) in self.eligible() {
            let Some(account) = self.slices.get(&slice) else { continue };
            if let Some(on) = self.pool.take(account.least) {
                self.start(now, id, on);
                pass.granted.push(id);
            }
        }
    }

    /// Returns the waiting runs of slices below their limits.
    fn eligible(&self) -> Vec<(SliceId, TokenHolder)> {
        let below = |run: &Run| {
            self.slices.get(&run.slice).is_some_and(|account| account.below_limit(self.config.cap()))
        };
        let waiting = self.runs.iter().filter(|(_, run)| run.waits() && below(run));
        waiting.map(|(id, run)| (run.slice, *id)).collect()
    }

    /// Gives a waiting run its token.
    fn start(&mut self, now: Timestamp, id: TokenHolder, on: SmShare) {
        let alone = self.runs.len() == 1;
        let Some(slice) = self.runs.get(&id).map(|run| run.slice) else { return };
        let Some(account) = self.slices.get(&slice) else { return };
        let unit = self.config.token();
        let length = match (alone, account.remaining(self.config.cap())) {
            (false, _) => Some(unit),
            (true, None) => None,
            (true, Some(remaining)) => Some(self.rest_of_limit(now, account, remaining).max(unit)),
        };
        let token = self.token(now, on, length);
        self.charge(id, token.charged);
        if let Some(run) = self.runs.get_mut(&id) {
            run.wants = false;
            run.skipped_since = None;
            run.present = Some(token);
        }
    }

    /// Returns the device time for which a lone run may compute without exceeding its limit: to the end of the
    /// window, or until the bucket is empty although it gains meanwhile.
    fn rest_of_limit(&self, now: Timestamp, account: &Account, remaining: Picos) -> Duration {
        match self.config.cap() {
            QuotaCap::Window(window) => {
                let end = self.period_start(now) + window;
                time_of(remaining).min(end.since(now))
            }
            QuotaCap::Bucket(_) => {
                let loss = u32::from(Permille::ALL.get() - account.terms.limit().get()).max(1);
                time_of(remaining).saturating_mul(u32::from(Permille::ALL.get())) / loss
            }
        }
    }

    fn token(&mut self, now: Timestamp, on: SmShare, length: Option<Duration>) -> Token {
        let id = TokenId(self.next_token);
        self.next_token += 1;
        let charged = length.map_or(0, picos);
        Token { id, on, begun: now, counted_from: now, length, charged, alone: true, withdrawn: false }
    }

    fn charge(&mut self, id: TokenHolder, amount: Picos) {
        let slice = self.runs.get(&id).map(|run| run.slice);
        if let Some(account) = slice.and_then(|slice| self.slices.get_mut(&slice)) {
            account.charge(amount);
        }
    }

    /// Widens new tokens with the units that are left, always the run that gains most; ties go to the run that
    /// was served first.
    fn widen(&mut self, granted: &[TokenHolder]) {
        let mut candidates = granted.to_vec();
        while let Some((place, wide)) = self.most_gain(&candidates) {
            let id = candidates[place];
            let token = self.runs.get_mut(&id).and_then(|run| run.present.as_mut());
            match token.and_then(|token| self.pool.exchange(token.on, wide).map(|on| token.on = on)) {
                Some(()) => {}
                None => drop(candidates.remove(place)),
            }
        }
    }

    fn most_gain(&self, candidates: &[TokenHolder]) -> Option<(usize, u8)> {
        let mut best: Option<(usize, u8, f64)> = None;
        for (place, id) in candidates.iter().enumerate() {
            let Some(run) = self.runs.get(id) else { continue };
            let (Some(account), Some(token)) = (self.slices.get(&run.slice), &run.present) else { continue };
            let Some((wide, gain)) = self.wider(run, account, token.on.units()) else { continue };
            if best.is_none_or(|(_, _, most)| gain > most) {
                best = Some((place, wide, gain));
            }
        }
        best.map(|(place, wide, _)| (place, wide))
    }

    /// Returns the next width of a run and its gain, if the gain is worth the units.
    fn wider(&self, run: &Run, account: &Account, units: u8) -> Option<(u8, f64)> {
        let wide = units.saturating_mul(2).min(account.most);
        if wide <= units {
            return None;
        }
        let rate = |units| run.curve.rate(self.config.grid().share(units));
        let gain = rate(wide) / rate(units);
        (gain > GAIN_MIN).then_some((wide, gain))
    }

    /// Records that tokens are not alone any more, if several runs hold tokens.
    fn note_company(&mut self) {
        if self.runs.values().filter(|run| run.present.is_some()).count() < 2 {
            return;
        }
        for run in self.runs.values_mut() {
            run.present.iter_mut().chain(&mut run.ahead).for_each(|token| token.alone = false);
        }
    }
}

fn key_of(at: Timestamp) -> i64 {
    i64::try_from(at.as_nanos()).unwrap_or(i64::MAX)
}

fn grant_of(run: TokenHolder, token: &Token) -> Action {
    Action::Grant { run, token: token.id, on: token.on, busy: token.length }
}
