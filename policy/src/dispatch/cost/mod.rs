//! What bringing a model to a GPU and running it there takes: the one cost model, used by every
//! policy, learned online, with the error of what it predicted (L15, L21).
//!
//! In: profiles, what each run took, how long each turn was, when weights had arrived. Out: the
//! expected run, and what is expected to be added to it where the model comes from the host over a
//! free link, over one that a neighbour loads on too, or from another GPU. Each is kept by model and
//! kind of GPU.
//!
//! **What a swap costs** is what it adds to the run, not how long the link is busy: a run overlaps
//! its load (T06), so that light models cost next to nothing. It is learned from turns that began
//! with the load: the turn less the computing in it. How long the link is busy is another estimate,
//! learned from arrivals, and the guess for the first while nothing was learned: no overlap. Without
//! either the link's rate says it. A load that another crossed on the way says nothing of either.
//!
//! The papers' numbers come from profiles before the fact (L15); learning, and every constant here,
//! is ours.

mod error;
mod estimate;
mod runs;

use std::time::Duration;

use millrace_types::BytesPerSec;

pub(super) use self::error::Errors;
pub use self::error::{Predicted, PredictionError};
use self::estimate::Estimate;
use self::runs::Runs;

/// Where a model comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// It is there.
    Here,
    /// The host, over a link that no neighbour uses.
    Host,
    /// The host, while a neighbour's model comes over the same link.
    SharedHost,
    /// Another GPU, over a direct link of this rate.
    Peer(BytesPerSec),
}

/// How much longer a load is taken to be beside another one, while that was not seen: half the link
/// for each of two, in percent.
const SHARED_PERCENT: u32 = 200;
/// What swaps from peers are kept in: thousandths of what the link's rate says.
const NOMINAL: u64 = 1000;

/// What is known of one model on one kind of GPU.
#[derive(Debug, Default, Clone)]
pub(super) struct Cost {
    runs: Runs,
    /// How long a copy from the host keeps a free link busy.
    transfer: Estimate,
    /// What a swap adds to a run.
    host: Estimate,
    shared: Estimate,
    /// In thousandths of the nominal time.
    peer: Estimate,
}

impl Cost {
    /// Replaces the estimates by those of an earlier process (L15). Without a `swap`, a load is assumed
    /// to overlap no run.
    pub(super) fn learned(&mut self, load: Duration, swap: Option<Duration>, run: Duration) {
        *self = Self {
            runs: Runs::profiled(run),
            transfer: Estimate::profiled(nanos(load)),
            host: Estimate::profiled(nanos(swap.unwrap_or(load))),
            ..Self::default()
        };
    }

    /// What a swap from the host adds to a run, where that was told or seen.
    pub(super) fn host(&self) -> Option<Duration> {
        self.host.get().map(Duration::from_nanos)
    }

    pub(super) fn ran(&mut self, rows: u32, run: Duration) {
        self.runs.add(rows, run);
    }

    pub(super) fn transferred(&mut self, took: Duration) {
        self.transfer.add(nanos(took));
    }

    /// Takes in what a swap added to a run; `nominal` is what the link's rate says.
    pub(super) fn swapped(&mut self, source: Source, added: Duration, nominal: Duration) {
        match source {
            Source::Here => {}
            Source::Host => self.host.add(nanos(added)),
            Source::SharedHost => self.shared.add(nanos(added)),
            Source::Peer(_) => {
                self.peer.add(nanos(added).saturating_mul(NOMINAL) / nanos(nominal).max(1));
            }
        }
    }

    /// What a run of so many rows takes.
    pub(super) fn run(&self, rows: u32) -> Option<Duration> {
        self.runs.get(rows)
    }

    /// The least that a run of any number of rows takes, of those that ran.
    pub(super) fn briefest(&self) -> Option<Duration> {
        self.runs.briefest()
    }

    /// How wrong the regression over rows is, with the sizes it was asked about (L15).
    pub(super) fn held_out(&self) -> Option<(f64, usize)> {
        self.runs.held_out()
    }

    /// How long a copy from the host keeps a free link busy, where that was told or seen.
    pub(super) fn transfer(&self) -> Option<Duration> {
        self.transfer.get().map(Duration::from_nanos)
    }

    /// What a swap adds to a run.
    pub(super) fn swap(&self, source: Source, nominal: Duration) -> Duration {
        let host = || {
            let known = self.host.get().or(self.transfer.get());
            known.map_or(nominal, Duration::from_nanos)
        };
        match source {
            Source::Here => Duration::ZERO,
            Source::Host => host(),
            Source::SharedHost => {
                let twice = || host() * SHARED_PERCENT / 100;
                self.shared.get().map_or_else(twice, Duration::from_nanos)
            }
            Source::Peer(_) => {
                let scaled =
                    |share: u64| Duration::from_nanos(nanos(nominal).saturating_mul(share) / NOMINAL);
                self.peer.get().map_or(nominal, scaled)
            }
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn each_source_is_learned_by_itself_and_guessed_from_the_next_best() {
        let mut cost = Cost::default();
        let swap = |cost: &Cost, source| cost.swap(source, MS(40));
        let peer = Source::Peer(BytesPerSec::gb(48));
        assert_eq!(cost.run(1), None);
        assert_eq!((swap(&cost, Source::Host), swap(&cost, peer)), (MS(40), MS(40)), "by the rate");
        assert_eq!(swap(&cost, Source::SharedHost), MS(80));
        cost.learned(MS(30), None, MS(10));
        assert_eq!((cost.run(1), cost.transfer()), (Some(MS(10)), Some(MS(30))));
        assert_eq!((swap(&cost, Source::Host), swap(&cost, Source::SharedHost)), (MS(30), MS(60)));
        (0..5).for_each(|_| cost.swapped(Source::Host, MS(12), MS(40)));
        assert_eq!(swap(&cost, Source::Host), MS(12), "most of it was hidden");
        assert_eq!(cost.transfer(), Some(MS(30)), "the link was busy all the same");
        cost.swapped(Source::SharedHost, MS(50), MS(40));
        assert_eq!(swap(&cost, Source::SharedHost), MS(50));
        cost.swapped(peer, MS(10), MS(20));
        assert_eq!(swap(&cost, peer), MS(20), "half of what this link's rate says");
        assert_eq!(swap(&cost, Source::Here), Duration::ZERO);
        cost.learned(MS(31), None, MS(11));
        assert_eq!((swap(&cost, Source::Host), cost.run(1)), (MS(31), Some(MS(11))));
    }
}
