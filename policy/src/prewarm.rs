//! Hints of functions that workflows are likely to ask for next (D29): whether a worker follows them, and
//! how often. Which GPU follows one is `dispatch`'s.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::{RevisionKey, Timestamp};

use crate::names::{self, UnknownName};

/// The least time between two hints of one function that a worker follows.
pub const PACE: Duration = Duration::from_secs(1);
/// Functions of which it is known when the last one was followed: hints of more are not followed.
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

/// When hints were followed last.
#[derive(Debug, Default)]
pub struct Pace {
    last: BTreeMap<RevisionKey, Timestamp>,
}

impl Pace {
    /// Whether a hint of a function is followed now.
    pub fn admits(&mut self, now: Timestamp, function: &RevisionKey) -> bool {
        if self.last.get(function).is_some_and(|&last| last + PACE > now) {
            return false;
        }
        if self.last.len() >= PACED_MAX && !self.last.contains_key(function) {
            self.last.retain(|_, last| *last + PACE > now);
            if self.last.len() >= PACED_MAX {
                return false;
            }
        }
        self.last.insert(function.clone(), now);
        true
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

    #[test]
    fn one_hint_of_a_function_is_followed_in_a_second() {
        let (mut pace, start) = (Pace::default(), Timestamp(5));
        assert!(pace.admits(start, &key(1)));
        assert!(!pace.admits(start + PACE / 2, &key(1)));
        assert!(pace.admits(start + PACE / 2, &key(2)), "each function has its own");
        assert!(pace.admits(start + PACE, &key(1)));
    }

    #[test]
    fn of_too_many_functions_no_more_are_followed_until_some_are_forgotten() {
        let (mut pace, start) = (Pace::default(), Timestamp(5));
        assert!((0..PACED_MAX).all(|number| pace.admits(start, &key(number))));
        assert!(!pace.admits(start, &key(PACED_MAX)));
        assert!(pace.admits(start + PACE, &key(PACED_MAX)));
    }

    #[test]
    fn it_is_on_unless_it_is_turned_off() {
        assert_eq!((Prewarm::default().to_string(), "off".parse()), ("on".to_owned(), Ok(Prewarm::Off)));
        assert!("maybe".parse::<Prewarm>().unwrap_err().to_string().contains("on, off"));
    }
}
