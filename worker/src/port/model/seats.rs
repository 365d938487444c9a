//! The seats of a modelled executor: the runs of a seat execute one after another, those of different seats at
//! the same time.
//!
//! On a GPU that is not shared, a run computes while its weights arrive. On a shared GPU a run launches piece by
//! piece under the seat's tokens, at the speed of its curve on the SMs of the token. There a run computes only
//! after all weights have arrived, for the rest of its time. A launch is slower by the factor by which the
//! launches under way at its begin exceed the memory bandwidth; launches that begin later do not slow it.

use std::collections::VecDeque;
use std::time::Duration;

use millrace_slices::gate::{GateEvent, LaunchPermit, SeatGate, SeatToken, WHOLE_RUN_MAX};
use millrace_types::{ComputeCurve, Permille, Timestamp};

/// Device time of a launch under a token with an end, and of a launch of a long run.
const PIECE: Duration = Duration::from_micros(2_500);

/// How a run comes by its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelledTokens {
    /// Whether a new period of the seat begins.
    pub anew: bool,
    pub first: Option<SeatToken>,
}

/// A seat.
#[derive(Debug, Default)]
pub(super) struct ModelledSeat {
    pub(super) gate: SeatGate,
    pub(super) runs: VecDeque<RunJob>,
}

#[derive(Debug)]
pub(super) struct RunJob {
    pub(super) run: u64,
    pub(super) program: u64,
    pub(super) generation: u64,
    pub(super) members: u32,
    pub(super) keeps: bool,
    pub(super) begun: Option<Timestamp>,
    /// The end of a run that has the whole GPU.
    pub(super) ends: Option<Timestamp>,
    /// The work of a run on a shared GPU.
    pub(super) shared: Option<SharedWork>,
}

/// The work of a run on a shared GPU.
#[derive(Debug, Default)]
pub(super) struct SharedWork {
    /// The time that the run still needs on all SMs; `None` until all weights are there.
    left: Option<Duration>,
    launch: Option<Launch>,
    /// The time from which the run has waited for a token.
    waits_since: Option<Timestamp>,
    pub(super) held: Duration,
    /// Device time of the launches.
    pub(super) computed: Duration,
    /// SM time of the launches.
    pub(super) sm: Duration,
    rests: bool,
}

/// The speed of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunSpeed {
    pub(super) curve: ComputeCurve,
    /// The part of the memory bandwidth that the run uses at full speed.
    pub(super) demand: Permille,
    /// The part of the memory bandwidth that the launches of other seats use.
    pub(super) others: f64,
}

#[derive(Debug, Clone, Copy)]
struct Launch {
    permit: LaunchPermit,
    began: Timestamp,
    ends: Timestamp,
    /// The part of the memory bandwidth that the launch uses.
    bandwidth: f64,
    /// The part of the run's time on all SMs.
    work: Duration,
}

/// The progress of a run on a shared GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SharedProgress {
    /// Nothing happens before the next command or the end of the launch.
    Waits,
    Moved,
    Ended,
}

impl SharedWork {
    /// Returns the time at which the launch under way ends.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.launch.map(|launch| launch.ends)
    }

    /// Returns the part of the memory bandwidth that the launch under way uses.
    pub(super) fn bandwidth(&self) -> f64 {
        self.launch.map_or(0.0, |launch| launch.bandwidth)
    }

    /// Gives the tokens back once, because weights are missing.
    pub(super) fn rest(&mut self, gate: &mut SeatGate) -> Option<GateEvent> {
        if std::mem::replace(&mut self.rests, true) { None } else { gate.rest() }
    }

    /// Sets the time that the run still needs on all SMs, after all weights have arrived. `before` is the time
    /// for which the run computed while weights arrived.
    pub(super) fn loaded(&mut self, left: Duration, before: Duration) {
        if self.left.is_none() {
            self.left = Some(left);
            self.computed = before;
            self.sm = before;
        }
    }

    /// Begins or ends a launch, if it is time. `own` rounds a time to the executor's clock.
    pub(super) fn settle(
        &mut self,
        now: Timestamp,
        gate: &mut SeatGate,
        speed: RunSpeed,
        own: impl Fn(Timestamp) -> Timestamp,
    ) -> (SharedProgress, Option<GateEvent>) {
        let Some(left) = self.left else { return (SharedProgress::Waits, None) };
        if let Some(Launch { permit, began, ends, work, .. }) = self.launch {
            if ends > now {
                return (SharedProgress::Waits, None);
            }
            self.launch = None;
            let left = left.saturating_sub(work);
            self.left = Some(left);
            let took = ends.since(began);
            self.sm += took * u32::from(permit.on.units()) / u32::from(permit.on.whole());
            self.computed += took;
            let event = gate.leave(permit, took);
            return (if left.is_zero() { SharedProgress::Ended } else { SharedProgress::Moved }, event);
        }
        let (permit, event) = gate.enter();
        let Some(permit) = permit else {
            self.waits_since.get_or_insert(now);
            return (SharedProgress::Waits, event);
        };
        self.held += self.waits_since.take().map_or(Duration::ZERO, |since| now.since(since));
        let share = u16::from(permit.on.units()) * 1000 / u16::from(permit.on.whole());
        let alone = speed.curve.rate(Permille::new(share).unwrap_or(Permille::ALL));
        let bandwidth = f64::from(speed.demand.get()) / 1000.0 * alone;
        let rate = alone / (speed.others + bandwidth).max(1.0);
        let whole = permit.open && left <= WHOLE_RUN_MAX;
        let work = if whole { left } else { left.min(PIECE.mul_f64(rate)) };
        let ends = own(now + work.div_f64(rate));
        self.launch = Some(Launch { permit, began: now, ends, bandwidth, work });
        (SharedProgress::Moved, event)
    }
}
