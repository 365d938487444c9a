//! Cost model: the time to bring a model to a GPU and to run it there. All policies share this
//! model. The model learns online and records the errors of its predictions (L15, L21).
//!
//! Samples are profiles, run times, durations of turns and arrivals of weights. Estimates are the
//! run time, and the time that a swap adds to the run. Swaps have separate estimates for copies
//! from the host over a free link, from the host over a link that a neighbour's load shares, and
//! from another GPU. Each estimate is separate for each model and kind of GPU.
//!
//! **The cost of a swap** is the time that the swap adds to the run, not the time that the link is
//! busy: a run overlaps its load (T06), so a swap of a light model costs almost nothing. The
//! samples are turns that began with the load: the duration of the turn minus its computation. The
//! time that the link is busy is a separate estimate, learned from arrivals. That estimate is the
//! first guess for the cost of a swap, as if nothing overlapped. Without either estimate, the
//! link's nominal rate applies. A load that another load disturbed is a sample for neither.
//!
//! The papers take these numbers from offline profiles (L15). Online learning, and every constant
//! here, is ours.

mod error;
mod estimate;
mod runs;

use std::time::Duration;

use millrace_types::BytesPerSec;

pub(super) use self::error::PredictionErrors;
pub use self::error::{PredictionError, TurnKind};
use self::estimate::{Estimate, nanos};
use self::runs::RunTimeModel;

/// Source of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SwapSource {
    /// The GPU holds the model.
    Here,
    /// The host, over a link that no neighbour uses.
    Host,
    /// The host, while a neighbour loads over the same link.
    SharedHost,
    /// Another GPU, over a direct link of this rate.
    Peer(BytesPerSec),
}

/// Assumed duration of a load beside another load, in percent of an undisturbed load, until
/// measured: each of two loads gets half the link.
const SHARED_PERCENT: u32 = 200;
/// Scale of swap costs from peers: thousandths of the time at the link's nominal rate.
const NOMINAL: u64 = 1000;

/// Estimates for a model on a kind of GPU.
#[derive(Debug, Default, Clone)]
pub(super) struct ModelCost {
    runs: RunTimeModel,
    /// Time that a copy from the host keeps a free link busy.
    transfer: Estimate,
    /// Time that a swap from the host over a free link adds to a run.
    host: Estimate,
    /// Time that a swap from the host over a shared link adds to a run.
    shared: Estimate,
    /// Time that a swap from a peer adds to a run, in thousandths of the nominal time.
    peer: Estimate,
}

impl ModelCost {
    /// Replaces the estimates by those of an earlier process (L15). Without a `swap`, no run is
    /// assumed to overlap a load.
    pub(super) fn restore_profile(&mut self, load: Duration, swap: Option<Duration>, run: Duration) {
        *self = Self {
            runs: RunTimeModel::profiled(run),
            transfer: Estimate::profiled(nanos(load)),
            host: Estimate::profiled(nanos(swap.unwrap_or(load))),
            ..Self::default()
        };
    }

    /// Returns the time that a swap from the host adds to a run, if profiled or measured.
    pub(super) fn host(&self) -> Option<Duration> {
        self.host.get().map(Duration::from_nanos)
    }

    pub(super) fn ran(&mut self, rows: u32, run: Duration) {
        self.runs.add(rows, run);
    }

    pub(super) fn transferred(&mut self, took: Duration) {
        self.transfer.add(nanos(took));
    }

    /// Adds a sample of the time that a swap added to a run; `nominal` is the time at the link's
    /// rate.
    pub(super) fn swapped(&mut self, source: SwapSource, added: Duration, nominal: Duration) {
        match source {
            SwapSource::Here => {}
            SwapSource::Host => self.host.add(nanos(added)),
            SwapSource::SharedHost => self.shared.add(nanos(added)),
            SwapSource::Peer(_) => {
                self.peer.add(nanos(added).saturating_mul(NOMINAL) / nanos(nominal).max(1));
            }
        }
    }

    /// Returns the run time of `rows` rows, if known.
    pub(super) fn run(&self, rows: u32) -> Option<Duration> {
        self.runs.get(rows)
    }

    /// Returns the least known run time of any number of rows.
    pub(super) fn shortest_run(&self) -> Option<Duration> {
        self.runs.briefest()
    }

    /// Returns the mean error of the regression over rows, in percent, with the number of batch
    /// sizes tested (L15).
    pub(super) fn held_out(&self) -> Option<(f64, usize)> {
        self.runs.held_out()
    }

    /// Returns the time that a copy from the host keeps a free link busy, if profiled or measured.
    pub(super) fn transfer(&self) -> Option<Duration> {
        self.transfer.get().map(Duration::from_nanos)
    }

    /// Returns the time that a swap adds to a run.
    pub(super) fn swap(&self, source: SwapSource, nominal: Duration) -> Duration {
        let host = || {
            let known = self.host.get().or(self.transfer.get());
            known.map_or(nominal, Duration::from_nanos)
        };
        match source {
            SwapSource::Here => Duration::ZERO,
            SwapSource::Host => host(),
            SwapSource::SharedHost => {
                let twice = || host() * SHARED_PERCENT / 100;
                self.shared.get().map_or_else(twice, Duration::from_nanos)
            }
            SwapSource::Peer(_) => {
                let scaled =
                    |share: u64| Duration::from_nanos(nanos(nominal).saturating_mul(share) / NOMINAL);
                self.peer.get().map_or(nominal, scaled)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn swap_cost_is_learned_by_source_with_fallback_estimates() {
        let mut cost = ModelCost::default();
        let swap = |cost: &ModelCost, source| cost.swap(source, MS(40));
        let peer = SwapSource::Peer(BytesPerSec::gb(48));
        assert_eq!(cost.run(1), None);
        assert_eq!((swap(&cost, SwapSource::Host), swap(&cost, peer)), (MS(40), MS(40)), "by the rate");
        assert_eq!(swap(&cost, SwapSource::SharedHost), MS(80));
        cost.restore_profile(MS(30), None, MS(10));
        assert_eq!((cost.run(1), cost.transfer()), (Some(MS(10)), Some(MS(30))));
        assert_eq!((swap(&cost, SwapSource::Host), swap(&cost, SwapSource::SharedHost)), (MS(30), MS(60)));
        (0..5).for_each(|_| cost.swapped(SwapSource::Host, MS(12), MS(40)));
        assert_eq!(swap(&cost, SwapSource::Host), MS(12), "most of it was hidden");
        assert_eq!(cost.transfer(), Some(MS(30)), "the link was busy all the same");
        cost.swapped(SwapSource::SharedHost, MS(50), MS(40));
        assert_eq!(swap(&cost, SwapSource::SharedHost), MS(50));
        cost.swapped(peer, MS(10), MS(20));
        assert_eq!(swap(&cost, peer), MS(20), "half of the nominal time of this link");
        assert_eq!(swap(&cost, SwapSource::Here), Duration::ZERO);
        cost.restore_profile(MS(31), None, MS(11));
        assert_eq!((swap(&cost, SwapSource::Host), cost.run(1)), (MS(31), Some(MS(11))));
    }
}
