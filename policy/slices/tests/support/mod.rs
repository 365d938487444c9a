//! A model of an executor in virtual time, which uses up its tokens and checks each of them.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use millrace_slices::tokens::{Action, Config, Event, TokenCore, TokenHolder, TokenId};
use millrace_slices::units::Grid;
use millrace_types::{ComputeCurve, Permille, SliceId, SmShare, Terms, Timestamp, UnitSet};

pub(crate) fn share(thousandths: u16) -> Permille {
    Permille::new(thousandths).unwrap()
}

/// Returns the terms of a partition, in thousandths.
pub(crate) fn terms(sms: u16, request: u16, limit: u16) -> Terms {
    Terms::new(share(sms), share(sms), share(request), share(limit)).unwrap()
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A token that a run holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub(crate) token: TokenId,
    pub(crate) on: SmShare,
    pub(crate) begun: Timestamp,
    /// Device time of the token; `None` for an open token.
    pub(crate) busy: Option<Duration>,
}

/// A place for one run at a time.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) slice: SliceId,
    pub(crate) run: Option<TokenHolder>,
    pub(crate) present: Option<Held>,
    pub(crate) ahead: Option<Held>,
    pub(crate) waits_since: Option<Timestamp>,
    /// The times at which runs of the seat computed.
    pub(crate) computed: Vec<(Timestamp, Timestamp)>,
}

/// An executor under a token core.
#[derive(Debug, Clone)]
pub(crate) struct Executor {
    pub(crate) core: TokenCore,
    pub(crate) config: Config,
    pub(crate) now: Timestamp,
    pub(crate) seats: Vec<Seat>,
    pub(crate) actions: Vec<Action>,
    next_run: u64,
}

impl Executor {
    /// Returns an executor with a slice for each of the terms, and a seat for each slice.
    pub(crate) fn new(config: Config, terms: &[Terms]) -> Self {
        let mut core = TokenCore::new(config);
        let mut seats = Vec::new();
        for (id, terms) in terms.iter().enumerate() {
            let slice = SliceId(id as u64);
            core.on_event(Timestamp::ZERO, Event::Terms { slice, terms: *terms }, &mut Vec::new());
            seats.push(Seat {
                slice,
                run: None,
                present: None,
                ahead: None,
                waits_since: None,
                computed: Vec::new(),
            });
        }
        Self { core, config, now: Timestamp::ZERO, seats, actions: Vec::new(), next_run: 0 }
    }

    /// Adds a seat to the slice of another seat.
    pub(crate) fn add_seat(&mut self, beside: usize) {
        let slice = self.seats[beside].slice;
        let seat =
            Seat { slice, run: None, present: None, ahead: None, waits_since: None, computed: Vec::new() };
        self.seats.push(seat);
    }

    /// Sends events of the present time, carries out the actions, and checks the tokens.
    pub(crate) fn send(&mut self, events: Vec<Event>) {
        let mut events = events;
        let mut rounds = 0;
        while !events.is_empty() {
            rounds += 1;
            assert!(rounds <= 100, "the core and the executor answer each other without end");
            let mut actions = Vec::new();
            self.core.on_events(self.now, events.drain(..), &mut actions);
            for action in &actions {
                events.extend(self.carry_out(action));
            }
            self.actions = actions;
            self.check();
        }
    }

    /// Carries out an action, and returns the executor's reply.
    fn carry_out(&mut self, action: &Action) -> Option<Event> {
        match *action {
            Action::Grant { run, token, on, busy } => {
                let now = self.now;
                let held = Held { token, on, begun: now, busy };
                let seat = self.seat_of(run);
                if let Some(present) = seat.present {
                    assert!(seat.ahead.is_none(), "run {run:?} has two tokens ahead");
                    assert_eq!(present.on, on, "a token ahead is for the same SMs");
                    seat.ahead = Some(held);
                } else {
                    seat.present = Some(held);
                }
                seat.waits_since = None;
                None
            }
            Action::Shorten { run, token, busy } => {
                let present = self.seat_of(run).present.as_mut().unwrap();
                assert_eq!(present.token, token);
                assert!(present.busy.is_none_or(|before| before > busy));
                present.busy = Some(busy);
                None
            }
            Action::Withdraw { run, token } => {
                let ahead = self.seat_of(run).ahead.take().unwrap();
                assert_eq!(ahead.token, token);
                Some(Event::Spent { run, token, busy: Duration::ZERO, more: true })
            }
            Action::Starved { .. } | Action::Sample { .. } => None,
        }
    }

    fn seat_of(&mut self, run: TokenHolder) -> &mut Seat {
        self.seats.iter_mut().find(|seat| seat.run == Some(run)).expect("tokens are for known runs")
    }

    /// Checks that the units of all tokens are disjoint and on the GPU (I1).
    fn check(&self) {
        let shares = self.seats.iter().filter_map(|seat| seat.present).map(|held| held.on);
        let sum: u32 = shares.clone().map(|share| u32::from(share.units())).sum();
        assert!(sum <= u32::from(self.config.grid().total()), "{sum} units are out");
        let blocks: Vec<UnitSet> = shares.filter_map(block).collect();
        let mut taken = 0_u16;
        for block in blocks {
            assert!(UnitSet::block(block.first(), block.width()) == Some(block), "{block:?} is not aligned");
            assert_eq!(taken & block.bits(), 0, "blocks overlap");
            taken |= block.bits();
        }
    }

    /// Returns whether a run of so many units would fit beside the tokens that are out.
    pub(crate) fn has_room(&self, units: u8) -> bool {
        let shares = || self.seats.iter().filter_map(|seat| seat.present).map(|held| held.on);
        match self.config.grid() {
            Grid::Caps100 => {
                shares().map(|share| u32::from(share.units())).sum::<u32>() + u32::from(units) <= 100
            }
            Grid::Blocks16 => {
                let taken = shares().filter_map(block).fold(0, |bits, block| bits | block.bits());
                let firsts = (0..16).step_by(usize::from(units));
                firsts.filter_map(|first| UnitSet::block(first, units)).any(|block| block.bits() & taken == 0)
            }
        }
    }

    /// Lets an idle seat's next run ask, or the present run ask ahead.
    pub(crate) fn ask(&mut self, seat: usize) {
        let run = match self.seats[seat].run {
            Some(run) => run,
            None => {
                self.next_run += 1;
                self.seats[seat].waits_since = Some(self.now);
                *self.seats[seat].run.insert(TokenHolder(self.next_run))
            }
        };
        let slice = self.seats[seat].slice;
        let event = Event::Ask { slice, run, deadline: None, curve: ComputeCurve::FLAT };
        self.send(vec![event]);
    }

    /// Gives back the present token of a seat. Without `more` the run has ended.
    pub(crate) fn give_back(&mut self, seat: usize, more: bool) {
        let event = self.end_token(seat, more);
        self.send(event.into_iter().collect());
    }

    fn end_token(&mut self, at: usize, more: bool) -> Option<Event> {
        let now = self.now;
        let seat = &mut self.seats[at];
        let run = seat.run?;
        let held = seat.present.take()?;
        seat.computed.push((held.begun, now));
        if more {
            seat.present = seat.ahead.take().map(|ahead| Held { begun: now, ..ahead });
            seat.waits_since = seat.present.is_none().then_some(now);
        } else {
            (seat.run, seat.ahead) = (None, None);
        }
        Some(Event::Spent { run, token: held.token, busy: now.since(held.begun), more })
    }

    /// Ends the run of a seat without a word about its token.
    pub(crate) fn leave(&mut self, at: usize) {
        let now = self.now;
        let seat = &mut self.seats[at];
        let Some(run) = seat.run.take() else { return };
        if let Some(held) = seat.present.take() {
            seat.computed.push((held.begun, now));
        }
        (seat.ahead, seat.waits_since) = (None, None);
        self.send(vec![Event::Left { run }]);
    }

    /// Advances the time, and ends each token that is used up on the way.
    pub(crate) fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let ends = |seat: &Seat| seat.present.and_then(|held| held.busy.map(|busy| held.begun + busy));
            let next = self.seats.iter().filter_map(ends).chain(self.core.next_wake()).min();
            let Some(next) = next.filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            let mut events = vec![Event::Tick];
            for seat in 0..self.seats.len() {
                if ends(&self.seats[seat]).is_some_and(|end| end <= self.now) {
                    events.extend(self.end_token(seat, true));
                }
            }
            self.send(events);
        }
        self.now = until;
    }

    /// Returns how long a seat computed between two times; the token that is out counts.
    pub(crate) fn computed(&self, seat: usize, from: Timestamp, to: Timestamp) -> Duration {
        let seat = &self.seats[seat];
        let present = seat.present.map(|held| (held.begun, self.now));
        let spans = seat.computed.iter().copied().chain(present);
        spans.map(|(begun, ended)| ended.min(to).since(begun.max(from))).sum()
    }
}

fn block(share: SmShare) -> Option<UnitSet> {
    match share {
        SmShare::Block(block) => Some(block),
        SmShare::Cap(_) => None,
    }
}
