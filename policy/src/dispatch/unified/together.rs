//! The class that all functions share whose requests run together ([`crate::batching`]).
//!
//! Put first, such a function runs in smaller batches; put last, it waits for a queue which batches, that
//! grow as it does, keep from ever being empty, and is late though there is capacity for it. Both take
//! throughput from all of them, so none goes before another for what it scored. But once half of those
//! that were asked lately are hopeless the load is more than batches can serve, and they give way to all
//! other functions. One that nobody asks has no say: what it scored once tells nothing of the load.

use std::collections::{BTreeMap, BTreeSet};

use super::flows::Class;
use crate::ids::FunctionIndex;

/// Lately is within so many requests and scores of such functions.
const LATELY: u64 = 1000;

#[derive(Debug, Clone, Copy)]
struct Heard {
    last: u64,
    /// What its own counts say of it.
    own: Class,
}

#[derive(Debug, Default)]
pub(super) struct Together {
    /// Those that were asked or scored lately.
    heard: BTreeMap<FunctionIndex, Heard>,
    by_last: BTreeSet<(u64, FunctionIndex)>,
    /// Requests and scores so far.
    events: u64,
    hopeless: usize,
    given_up: bool,
    /// Whether any scored or left since it was last looked whether they are given up.
    scored: bool,
}

impl Together {
    /// A function was asked, or `scored`; its own counts say this of it.
    pub(super) fn hear(&mut self, function: FunctionIndex, own: Class, scored: bool) {
        self.events += 1;
        self.scored |= scored;
        self.take_out(function);
        self.heard.insert(function, Heard { last: self.events, own });
        self.by_last.insert((self.events, function));
        self.hopeless += usize::from(own == Class::Hopeless);
        while let Some(&(_, oldest)) = self.by_last.first().filter(|(last, _)| last + LATELY <= self.events) {
            self.take_out(oldest);
            self.scored = true;
        }
    }

    /// A function shares no class any more.
    pub(super) fn drop(&mut self, function: FunctionIndex) {
        self.scored |= self.take_out(function);
    }

    fn take_out(&mut self, function: FunctionIndex) -> bool {
        let gone = self.heard.remove(&function);
        if let Some(Heard { last, own }) = gone {
            self.by_last.remove(&(last, function));
            self.hopeless -= usize::from(own == Class::Hopeless);
        }
        gone.is_some()
    }

    /// What they share.
    pub(super) fn class(&self) -> Class {
        if self.given_up { Class::Hopeless } else { Class::Safe }
    }

    /// Looks again whether they are given up, which is from when half of them are hopeless until no more
    /// than a quarter is; tells whether that has changed. All of them then change, so that it must not
    /// come and go with each.
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

    /// Asserts that what is counted is so, of these functions with what their counts say.
    #[cfg(test)]
    pub(super) fn check(&self, sharing: &BTreeMap<FunctionIndex, Class>) {
        let hopeless = self.heard.values().filter(|it| it.own == Class::Hopeless).count();
        assert_eq!((self.hopeless, self.by_last.len()), (hopeless, self.heard.len()));
        for (function, Heard { last, own }) in &self.heard {
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

    /// Whether they are given up once each has scored so.
    fn given_up(together: &mut Together, own: [Class; 4]) -> bool {
        FUNCTIONS.into_iter().zip(own).for_each(|(function, own)| together.hear(function, own, true));
        together.look_again();
        together.class() == Class::Hopeless
    }

    #[test]
    fn they_are_given_up_at_a_half_and_not_again_before_a_quarter() {
        use Class::{Endangered as E, Hopeless as H, Safe as S};
        let mut together = Together::default();
        assert!(!given_up(&mut together, [H, S, E, S]));
        assert!(given_up(&mut together, [H, H, E, S]));
        assert!(!given_up(&mut together, [H, S, E, S]), "a quarter");
        assert!(given_up(&mut together, [H, H, H, H]));
        assert!(given_up(&mut together, [H, H, E, S]), "half is more than a quarter");
    }

    #[test]
    fn who_is_not_asked_has_no_say() {
        let mut together = Together::default();
        together.hear(FUNCTIONS[0], Class::Hopeless, true);
        together.hear(FUNCTIONS[1], Class::Safe, true);
        assert!(together.look_again(), "it is half of them");
        for _ in 0..LATELY - 2 {
            together.hear(FUNCTIONS[1], Class::Safe, true);
            assert!(!together.look_again());
        }
        together.hear(FUNCTIONS[1], Class::Safe, false);
        assert!(together.look_again(), "the other one is forgotten");
        assert_eq!(together.class(), Class::Safe);
        together.hear(FUNCTIONS[0], Class::Hopeless, false);
        assert!(!together.look_again(), "nothing was scored since");
        together.hear(FUNCTIONS[0], Class::Hopeless, true);
        assert!(together.look_again());
        together.drop(FUNCTIONS[0]);
        assert!(together.look_again(), "it has no say any more");
    }
}
