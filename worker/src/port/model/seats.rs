//! The seats of a modelled executor: the runs of a seat execute one after another, those of different seats at
//! the same time.
//!
//! On a GPU that is not shared, a run computes while its weights arrive. On a shared GPU a run launches piece by
//! piece under the seat's tokens, and is faster the more SMs a token has, in proportion. There a run computes
//! only after all weights have arrived, for the rest of its time. Runs do not slow each other's memory.

use std::collections::VecDeque;
use std::time::Duration;

use millrace_slices::gate::{GateEvent, LaunchPermit, SeatGate, SeatToken};
use millrace_types::Timestamp;

/// Device time of a launch under a token with an end, and of a launch of a long run.
const PIECE: Duration = Duration::from_micros(2_500);
/// Longest run that is a single launch under a token without an end.
const WHOLE_MAX: Duration = Duration::from_millis(10);

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

#[derive(Debug, Clone, Copy)]
struct Launch {
    permit: LaunchPermit,
    began: Timestamp,
    ends: Timestamp,
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
        own: impl Fn(Timestamp) -> Timestamp,
    ) -> (SharedProgress, Option<GateEvent>) {
        let Some(left) = self.left else { return (SharedProgress::Waits, None) };
        if let Some(Launch { permit, began, ends, work }) = self.launch {
            if ends > now {
                return (SharedProgress::Waits, None);
            }
            self.launch = None;
            let left = left.saturating_sub(work);
            self.left = Some(left);
            self.sm += work;
            let took = ends.since(began);
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
        let whole = permit.open && left <= WHOLE_MAX;
        let units = u32::from(permit.on.units());
        let all = u32::from(permit.on.whole());
        let work = if whole { left } else { left.min(PIECE * units / all) };
        let ends = own(now + work * all / units);
        self.launch = Some(Launch { permit, began: now, ends, work });
        (SharedProgress::Moved, event)
    }
}
