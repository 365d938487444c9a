//! Whether the slices of a GPU get their requests: the token core itself runs over a virtual window in which all
//! slices always want to run.
//!
//! A rectangle's place in time (the paper's packing) is not enforced when slices run; the order of service is. The
//! dry run therefore asks the order of service. All tokens are used up, so the tokens of a set begin and end
//! together.

use std::time::Duration;

use millrace_types::{ComputeCurve, SliceId, SmShare, Terms, Timestamp};

use crate::tokens::{Action, Config, Event, TokenCore, TokenHolder, TokenId};

/// Number of periods of the quota that a dry run lasts.
pub const PERIODS: u32 = 2;

/// A token of a dry run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granted {
    /// Position of the slice in the list of terms.
    pub slice: usize,
    pub on: SmShare,
    /// Time since the beginning of the last period.
    pub from: Duration,
    pub to: Duration,
}

/// Returns the largest shortfall of a request over the last period. A set fits a GPU if the shortfall is at most
/// one token.
#[must_use]
pub fn shortfall(config: Config, terms: &[Terms]) -> Duration {
    DryRun::new(config, terms).finish(&mut |_| {})
}

/// Returns the tokens of the last period, in the order in which they were granted.
#[must_use]
pub fn timeline(config: Config, terms: &[Terms]) -> Vec<Granted> {
    let mut tokens = Vec::new();
    DryRun::new(config, terms).finish(&mut |token| tokens.push(token));
    tokens
}

/// A token that is out.
#[derive(Debug, Clone, Copy)]
struct Out {
    token: TokenId,
    on: SmShare,
    begun: Timestamp,
    ends: Timestamp,
}

struct DryRun {
    core: TokenCore,
    now: Timestamp,
    horizon: Timestamp,
    last_period: Timestamp,
    /// The token of each slice, by position.
    out: Vec<Option<Out>>,
    /// Events of the present time.
    events: Vec<Event>,
    actions: Vec<Action>,
}

impl DryRun {
    fn new(config: Config, terms: &[Terms]) -> Self {
        let period = config.cap().period();
        let mut events = Vec::with_capacity(2 * terms.len());
        for (place, terms) in terms.iter().enumerate() {
            let slice = SliceId(place as u64);
            let run = TokenHolder(place as u64);
            events.push(Event::Terms { slice, terms: *terms });
            // A flat curve gains nothing from width: units beyond the least are not promised.
            events.push(Event::Ask { slice, run, deadline: None, curve: ComputeCurve::FLAT });
        }
        Self {
            core: TokenCore::new(config),
            now: Timestamp::ZERO,
            horizon: Timestamp::ZERO + period * PERIODS,
            last_period: Timestamp::ZERO + period * (PERIODS - 1),
            out: vec![None; terms.len()],
            events,
            actions: Vec::new(),
        }
    }

    /// Runs to the horizon, and returns the largest shortfall.
    fn finish(mut self, record: &mut dyn FnMut(Granted)) -> Duration {
        loop {
            self.core.on_events(self.now, self.events.drain(..), &mut self.actions);
            self.carry_out();
            if self.now >= self.horizon {
                break;
            }
            self.now = self.next();
            self.end_tokens(record);
        }
        let slices = 0..self.out.len() as u64;
        slices.map(|slice| self.core.missed(SliceId(slice))).max().unwrap_or_default()
    }

    fn carry_out(&mut self) {
        for action in self.actions.drain(..) {
            match action {
                Action::Grant { run, token, on, busy, .. } => {
                    let ends = busy.map_or(self.horizon, |busy| self.now + busy);
                    self.out[run.0 as usize] = Some(Out { token, on, begun: self.now, ends });
                }
                Action::Shorten { run, busy, .. } => {
                    if let Some(out) = &mut self.out[run.0 as usize] {
                        out.ends = out.begun + busy;
                    }
                }
                // Runs of a dry run do not ask ahead, so no token is withdrawn.
                Action::Withdraw { .. } | Action::Starved { .. } | Action::Sample { .. } => {}
            }
        }
    }

    /// Returns the next time at which a token ends or the core wants to wake.
    fn next(&self) -> Timestamp {
        let ends = self.out.iter().flatten().map(|out| out.ends);
        ends.chain(self.core.next_wake()).min().unwrap_or(self.horizon).min(self.horizon)
    }

    /// Reports the tokens that have ended.
    fn end_tokens(&mut self, record: &mut dyn FnMut(Granted)) {
        for (slice, place) in self.out.iter_mut().enumerate() {
            let Some(out) = place.take_if(|out| out.ends <= self.now) else { continue };
            let busy = self.now.since(out.begun);
            self.events.push(Event::Spent {
                run: TokenHolder(slice as u64),
                token: out.token,
                busy,
                more: true,
            });
            if self.now > self.last_period {
                let from = out.begun.since(self.last_period);
                record(Granted { slice, on: out.on, from, to: self.now.since(self.last_period) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::Permille;

    use super::*;
    use crate::tokens::{QuotaCap, TokenOrder};
    use crate::units::Grid;

    fn terms(sm: u16, request: u16) -> Terms {
        let share = |percent: u16| Permille::new(percent * 10).unwrap();
        Terms::new(share(sm), share(sm), share(request), share(request)).unwrap()
    }

    /// Four ResNet, two RNNT and two BERT pods (FaST-GShare, section 5.4).
    fn paper_pods() -> Vec<Terms> {
        let pods = [vec![terms(12, 40); 4], vec![terms(24, 40); 2], vec![terms(50, 60); 2]];
        pods.concat()
    }

    const ORDERS: [TokenOrder; 2] = [TokenOrder::Head, TokenOrder::Skip { age: Duration::from_secs(2) }];

    #[test]
    fn the_papers_pods_share_a_gpu_under_each_rule() {
        for order in ORDERS {
            for cap in [QuotaCap::Window(Duration::from_secs(1)), QuotaCap::Bucket(Duration::from_secs(1))] {
                for grid in [Grid::Caps100, Grid::Blocks16] {
                    let config = Config::new(grid, Duration::from_millis(5), order, cap).unwrap();
                    let missed = shortfall(config, &paper_pods());
                    assert!(missed <= config.token(), "{config:?} misses {missed:?}");
                }
            }
        }
    }

    #[test]
    fn a_ninth_pod_misses_its_request_although_its_area_is_free() {
        let mut pods = paper_pods();
        pods.push(terms(12, 13));
        assert!(shortfall(Config::PAPER, &pods) > Config::PAPER.token());
    }

    #[test]
    fn a_lone_slice_gets_exactly_its_limit() {
        for config in [Config::PAPER, Config::SLICES] {
            let tokens = timeline(config, &[terms(24, 30)]);
            let sum: Duration = tokens.iter().map(|token| token.to.saturating_sub(token.from)).sum();
            let bound = Duration::from_millis(300) + config.token();
            assert!((Duration::from_millis(295)..=bound).contains(&sum), "{config:?}: {sum:?}");
        }
    }

    #[test]
    fn a_timeline_has_no_two_tokens_on_the_same_units_at_a_time() {
        let pods: Vec<Terms> = paper_pods();
        let tokens = timeline(Config::SLICES, &pods);
        for (at, one) in tokens.iter().enumerate() {
            for other in &tokens[at + 1..] {
                let apart = one.to <= other.from || other.to <= one.from;
                let (SmShare::Block(a), SmShare::Block(b)) = (one.on, other.on) else { panic!("{one:?}") };
                assert!(apart || a.bits() & b.bits() == 0, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn an_empty_gpu_misses_nothing() {
        assert_eq!(shortfall(Config::SLICES, &[]), Duration::ZERO);
        assert_eq!(timeline(Config::SLICES, &[]), []);
    }
}
