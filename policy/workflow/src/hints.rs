//! Prewarming hints for functions that workflows are likely to request next (D29): whether a worker
//! follows them, and how often. `dispatch` chooses the GPU.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::{RevisionKey, Timestamp};

use crate::PrewarmTarget;
use millrace_core::names::{self, UnknownName};

/// Minimum time between two followed hints for the same function and target.
pub const PACE: Duration = Duration::from_secs(1);
/// Maximum number of (function, target) entries with the time of the last followed hint. While that
/// many entries are recent, hints for other entries are not followed.
pub const PACED_MAX: usize = 1024;

/// Whether a worker follows prewarming hints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Prewarm {
    /// The worker follows a hint if that delays no request.
    #[default]
    On,
    /// The worker ignores hints: models are loaded for the requests that need them.
    Off,
}

/// Both settings by name.
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

/// Times of the last followed hints. The target is part of the key, because a step far down a
/// workflow is first brought into host memory and a moment later onto a GPU: the first must not
/// delay the second.
#[derive(Debug, Default)]
pub struct HintRateLimit {
    last: BTreeMap<(RevisionKey, PrewarmTarget), Timestamp>,
}

impl HintRateLimit {
    /// Returns whether a hint for a function may be followed now. A hint without effect costs
    /// nothing: only [`Self::followed`] starts the minimum time.
    pub fn admits(&mut self, now: Timestamp, function: &RevisionKey, to: PrewarmTarget) -> bool {
        let step = (function.clone(), to);
        if self.last.get(&step).is_some_and(|&last| last + PACE > now) {
            return false;
        }
        if self.last.len() >= PACED_MAX && !self.last.contains_key(&step) {
            self.last.retain(|_, last| *last + PACE > now);
        }
        self.last.len() < PACED_MAX || self.last.contains_key(&step)
    }

    /// Records that an admitted hint started a load.
    pub fn followed(&mut self, now: Timestamp, function: &RevisionKey, to: PrewarmTarget) {
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

    fn follows(pace: &mut HintRateLimit, now: Timestamp, function: usize, to: PrewarmTarget) -> bool {
        let admitted = pace.admits(now, &key(function), to);
        if admitted {
            pace.followed(now, &key(function), to);
        }
        admitted
    }

    #[test]
    fn a_function_has_one_hint_followed_per_second() {
        let mut pace = HintRateLimit::default();
        let start = Timestamp(5);
        let gpu = PrewarmTarget::Gpu;
        assert!(follows(&mut pace, start, 1, gpu));
        assert!(!follows(&mut pace, start + PACE / 2, 1, gpu));
        assert!(follows(&mut pace, start + PACE / 2, 2, gpu), "each function has its own time");
        assert!(follows(&mut pace, start + PACE, 1, gpu));
    }

    #[test]
    fn a_hint_without_effect_or_for_host_memory_delays_no_gpu_hint() {
        let mut pace = HintRateLimit::default();
        let start = Timestamp(5);
        assert!(pace.admits(start, &key(1), PrewarmTarget::Gpu));
        assert!(pace.admits(start, &key(1), PrewarmTarget::Gpu), "the first hint had no effect");
        assert!(follows(&mut pace, start, 1, PrewarmTarget::Host));
        assert!(!follows(&mut pace, start + PACE / 50, 1, PrewarmTarget::Host));
        assert!(follows(&mut pace, start + PACE / 50, 1, PrewarmTarget::Gpu), "the GPU is another target");
    }

    #[test]
    fn a_full_pace_table_admits_no_new_function_until_entries_expire() {
        let mut pace = HintRateLimit::default();
        let start = Timestamp(5);
        let gpu = PrewarmTarget::Gpu;
        assert!((0..PACED_MAX).all(|number| follows(&mut pace, start, number, gpu)));
        assert!(!follows(&mut pace, start, PACED_MAX, gpu));
        assert!(follows(&mut pace, start + PACE, PACED_MAX, gpu));
    }

    #[test]
    fn prewarming_is_on_by_default() {
        assert_eq!((Prewarm::default().to_string(), "off".parse()), ("on".to_owned(), Ok(Prewarm::Off)));
        assert!("maybe".parse::<Prewarm>().unwrap_err().to_string().contains("on, off"));
    }
}
