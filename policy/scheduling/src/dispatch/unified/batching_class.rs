//! Shared class of all functions with batching ([`crate::batching`]).
//!
//! A function that went first would run in smaller batches. A function that went last would wait
//! for a queue that never empties, because batches grow with the queue; such a function would be
//! late despite free capacity. Both take throughput from all functions with batching, so none of
//! them goes before another because of its score. But once half of those with recent requests are
//! hopeless, the load is more than batches can serve, and all of them give way to the other
//! functions. A function without recent requests is ignored: its old score tells nothing about the
//! present load.

use std::collections::{BTreeMap, BTreeSet};

use super::flows::FlowUrgency;
use millrace_core::ids::FunctionIndex;

/// Number of requests and scores of functions with batching that count as recent.
const LATELY: u64 = 1000;

/// Most recent event of a function.
#[derive(Debug, Clone, Copy)]
struct RecentFunction {
    last: u64,
    /// Class by the function's own counts.
    own: FlowUrgency,
}

#[derive(Debug, Default)]
pub(super) struct BatchingClass {
    /// Functions with a recent request or score.
    heard: BTreeMap<FunctionIndex, RecentFunction>,
    by_last: BTreeSet<(u64, FunctionIndex)>,
    /// Number of requests and scores so far.
    events: u64,
    hopeless: usize,
    given_up: bool,
    /// Whether a function scored, left or expired since the last check whether to give way.
    scored: bool,
}

impl BatchingClass {
    /// Notes that a function got a request, or a score if `scored`; `own` is the class by its own
    /// counts.
    pub(super) fn record_event(&mut self, function: FunctionIndex, own: FlowUrgency, scored: bool) {
        self.events += 1;
        self.scored |= scored;
        self.take_out(function);
        self.heard.insert(function, RecentFunction { last: self.events, own });
        self.by_last.insert((self.events, function));
        self.hopeless += usize::from(own == FlowUrgency::Hopeless);
        while let Some(&(_, oldest)) = self.by_last.first().filter(|(last, _)| last + LATELY <= self.events) {
            self.take_out(oldest);
            self.scored = true;
        }
    }

    /// Removes a function that no longer shares the class.
    pub(super) fn drop(&mut self, function: FunctionIndex) {
        self.scored |= self.take_out(function);
    }

    fn take_out(&mut self, function: FunctionIndex) -> bool {
        let gone = self.heard.remove(&function);
        if let Some(RecentFunction { last, own }) = gone {
            self.by_last.remove(&(last, function));
            self.hopeless -= usize::from(own == FlowUrgency::Hopeless);
        }
        gone.is_some()
    }

    /// Returns the shared class.
    pub(super) fn class(&self) -> FlowUrgency {
        if self.given_up { FlowUrgency::Hopeless } else { FlowUrgency::Safe }
    }

    /// Checks again whether to give way, and returns whether that changed. The functions give way
    /// from when half of them are hopeless until at most a quarter is: the gap prevents frequent
    /// changes, each of which moves all functions.
    pub(super) fn look_again(&mut self) -> bool {
        if !std::mem::take(&mut self.scored) {
            return false;
        }
        let all = self.heard.len();
        let given_up = if self.given_up {
            self.hopeless * 4 > all
        } else {
            self.hopeless > 0 && self.hopeless * 2 >= all
        };
        std::mem::replace(&mut self.given_up, given_up) != given_up
    }

    /// Asserts that the counts agree with these functions and their classes.
    #[cfg(test)]
    pub(super) fn check(&self, sharing: &BTreeMap<FunctionIndex, FlowUrgency>) {
        let hopeless = self.heard.values().filter(|it| it.own == FlowUrgency::Hopeless).count();
        assert_eq!((self.hopeless, self.by_last.len()), (hopeless, self.heard.len()));
        for (function, RecentFunction { last, own }) in &self.heard {
            assert_eq!(Some(own), sharing.get(function), "{function:?}");
            assert!(self.by_last.contains(&(*last, *function)) && last + LATELY > self.events);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FUNCTIONS: [FunctionIndex; 4] =
        [FunctionIndex(0), FunctionIndex(1), FunctionIndex(2), FunctionIndex(3)];

    /// Returns whether the functions give way after each has scored with this class.
    fn given_up(together: &mut BatchingClass, own: [FlowUrgency; 4]) -> bool {
        FUNCTIONS.into_iter().zip(own).for_each(|(function, own)| together.record_event(function, own, true));
        together.look_again();
        together.class() == FlowUrgency::Hopeless
    }

    #[test]
    fn functions_give_way_at_half_hopeless_until_a_quarter_is() {
        use FlowUrgency::{Endangered as E, Hopeless as H, Safe as S};
        let mut together = BatchingClass::default();
        assert!(!given_up(&mut together, [H, S, E, S]));
        assert!(given_up(&mut together, [H, H, E, S]));
        assert!(!given_up(&mut together, [H, S, E, S]), "a quarter");
        assert!(given_up(&mut together, [H, H, H, H]));
        assert!(given_up(&mut together, [H, H, E, S]), "half is more than a quarter");
    }

    #[test]
    fn functions_without_recent_requests_do_not_count() {
        let mut together = BatchingClass::default();
        together.record_event(FUNCTIONS[0], FlowUrgency::Hopeless, true);
        together.record_event(FUNCTIONS[1], FlowUrgency::Safe, true);
        assert!(together.look_again(), "half of the functions are hopeless");
        for _ in 0..LATELY - 2 {
            together.record_event(FUNCTIONS[1], FlowUrgency::Safe, true);
            assert!(!together.look_again());
        }
        together.record_event(FUNCTIONS[1], FlowUrgency::Safe, false);
        assert!(together.look_again(), "the idle function is forgotten");
        assert_eq!(together.class(), FlowUrgency::Safe);
        together.record_event(FUNCTIONS[0], FlowUrgency::Hopeless, false);
        assert!(!together.look_again(), "no score since the last check");
        together.record_event(FUNCTIONS[0], FlowUrgency::Hopeless, true);
        assert!(together.look_again());
        together.drop(FUNCTIONS[0]);
        assert!(together.look_again(), "the function no longer counts");
    }
}
