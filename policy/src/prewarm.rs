//! Hints of functions that workflows are likely to ask for next (D29): whether a worker follows them, and
//! how often. Which GPU follows one is `dispatch`'s.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::{RevisionKey, Timestamp};

use crate::names::{self, UnknownName};
use crate::workflow::Nearness;

/// The least time between two hints of one function that a worker follows equally far.
pub const PACE: Duration = Duration::from_secs(1);
/// Functions, and how far, of which it is known when the last hint was followed: hints of more are not
/// followed.
pub const PACED_MAX: usize = 1024;

/// Whether a worker follows hints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Prewarm {
    /// Where it is in nobody's way.
    #[default]
    On,
    /// Never: models come with the requests that need them.
    Off,
}

/// By name.
pub const PREWARMS: [(&str, Prewarm); 2] = [("on", Prewarm::On), ("off", Prewarm::Off)];

impl FromStr for Prewarm {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("prewarm", &PREWARMS, text)
    }
}

impl fmt::Display for Prewarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(names::of(&PREWARMS, self))
    }
}

/// When hints were followed last. A step far down a workflow is first to be brought into host memory and
/// a moment later onto a GPU: the two do not hold each other up.
#[derive(Debug, Default)]
pub struct Pace {
    last: BTreeMap<(RevisionKey, Nearness), Timestamp>,
}

impl Pace {
    /// Whether a hint of a function may be followed now. What does not come of it costs nothing: only
    /// what [`Self::followed`] is told of does.
    pub fn admits(&mut self, now: Timestamp, function: &RevisionKey, to: Nearness) -> bool {
        let step = (function.clone(), to);
        if self.last.get(&step).is_some_and(|&last| last + PACE > now) {
            return false;
        }
        if self.last.len() >= PACED_MAX && !self.last.contains_key(&step) {
            self.last.retain(|_, last| *last + PACE > now);
        }
        self.last.len() < PACED_MAX || self.last.contains_key(&step)
    }

    /// A hint that was admitted had something brought.
    pub fn followed(&mut self, now: Timestamp, function: &RevisionKey, to: Nearness) {
        self.last.insert((function.clone(), to), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::{FunctionKey, FunctionName, Revision, TenantName};

    fn key(number: usize) -> RevisionKey {
        let name = FunctionName::new(&format!("f{number}")).unwrap();
        let function = FunctionKey { tenant: TenantName::default(), name };
        RevisionKey { function, revision: Revision::FIRST }
    }

    fn follows(pace: &mut Pace, now: Timestamp, function: usize, to: Nearness) -> bool {
        let admitted = pace.admits(now, &key(function), to);
        if admitted {
            pace.followed(now, &key(function), to);
        }
        admitted
    }

    #[test]
    fn one_hint_of_a_function_is_followed_in_a_second() {
        let (mut pace, start, gpu) = (Pace::default(), Timestamp(5), Nearness::Gpu);
        assert!(follows(&mut pace, start, 1, gpu));
        assert!(!follows(&mut pace, start + PACE / 2, 1, gpu));
        assert!(follows(&mut pace, start + PACE / 2, 2, gpu), "each function has its own");
        assert!(follows(&mut pace, start + PACE, 1, gpu));
    }

    #[test]
    fn a_hint_that_had_nothing_brought_or_less_far_holds_up_no_other() {
        let (mut pace, start) = (Pace::default(), Timestamp(5));
        assert!(pace.admits(start, &key(1), Nearness::Gpu));
        assert!(pace.admits(start, &key(1), Nearness::Gpu), "nothing came of the first");
        assert!(follows(&mut pace, start, 1, Nearness::Host));
        assert!(!follows(&mut pace, start + PACE / 50, 1, Nearness::Host));
        assert!(follows(&mut pace, start + PACE / 50, 1, Nearness::Gpu), "it is the next step now");
    }

    #[test]
    fn of_too_many_functions_no_more_are_followed_until_some_are_forgotten() {
        let (mut pace, start, gpu) = (Pace::default(), Timestamp(5), Nearness::Gpu);
        assert!((0..PACED_MAX).all(|number| follows(&mut pace, start, number, gpu)));
        assert!(!follows(&mut pace, start, PACED_MAX, gpu));
        assert!(follows(&mut pace, start + PACE, PACED_MAX, gpu));
    }

    #[test]
    fn it_is_on_unless_it_is_turned_off() {
        assert_eq!((Prewarm::default().to_string(), "off".parse()), ("on".to_owned(), Ok(Prewarm::Off)));
        assert!("maybe".parse::<Prewarm>().unwrap_err().to_string().contains("on, off"));
    }
}
