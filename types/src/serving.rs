//! How a node serves a function among others: who goes first, what stays on a GPU, which requests
//! run as one. What the papers have of it is in MECHANISMS L15 and L22; the rest follows Triton's
//! `dynamic_batching` and `priority_levels`, so that what its users know holds here.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The most requests, or rows of requests, that run as one.
pub const BATCH_SIZE_MAX: u32 = 64;
/// The longest a request may be held back for others to join it.
pub const BATCH_WAIT_MAX: Duration = Duration::from_secs(1);
/// The most copies of a model that a node may be asked to keep on its GPUs.
pub const MIN_WARM_MAX: u32 = 64;
/// The longest time after which an unused copy may be dropped: a day.
pub const EVICT_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// How a function is served.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Serving {
    /// Whose requests go first.
    #[serde(default)]
    pub priority: Priority,
    /// What of its model stays on GPUs.
    #[serde(default)]
    pub residency: Residency,
    /// Which of its requests run as one; `None`: each runs alone.
    #[serde(default)]
    pub batching: Option<Batching>,
}

/// Whose requests go first: 1 before 2, and so on to [`Priority::LAST`]. A request of a higher
/// priority leaves the queue before all of a lower one that could go to the same GPU; it stops
/// nothing that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Priority(u8);

impl Priority {
    /// Before all others.
    pub const FIRST: Self = Self(1);
    /// After all others.
    pub const LAST: Self = Self(8);

    /// From a number. `None` if there is no such priority.
    #[must_use]
    pub fn new(level: u64) -> Option<Self> {
        let level = u8::try_from(level).ok()?;
        (Self::FIRST.0..=Self::LAST.0).contains(&level).then_some(Self(level))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// What a request asks for of a function with this priority: it may step back, never ahead of
    /// what the function's owner gave it. 0 asks for nothing; a number beyond the last is the last.
    #[must_use]
    pub fn asked(self, level: u64) -> Self {
        let asked = u8::try_from(level).map_or(Self::LAST.0, |level| level.min(Self::LAST.0));
        Self(self.0.max(asked))
    }
}

/// The middle, so that there is room on both sides.
impl Default for Priority {
    fn default() -> Self {
        Self(4)
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What of a model stays on the GPUs of each node that has it. Functions that share a model share
/// what is kept: the most any of them asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Residency {
    /// Its copies make room for other models last: only where nothing else on their GPU makes enough.
    #[serde(default)]
    pub pin: bool,
    /// So many GPUs of the node hold it, without a request for it: loaded as soon as one of them is
    /// idle with room beside what is kept there, and kept as if pinned.
    #[serde(default)]
    pub min_warm: u32,
    /// A copy that nobody used for so long is dropped, though nothing needs its room. `None`: never.
    #[serde(default)]
    pub evict_after: Option<Duration>,
}

impl Residency {
    /// What to keep for two functions with one model.
    #[must_use]
    pub fn most(self, other: Self) -> Self {
        let evict_after = match (self.evict_after, other.evict_after) {
            (Some(one), Some(other)) => Some(one.max(other)),
            _ => None,
        };
        Self { pin: self.pin || other.pin, min_warm: self.min_warm.max(other.min_warm), evict_after }
    }
}

/// Which requests of a function run as one: those whose inputs differ in their first dimension at
/// most, and ask for the same outputs. What waits for a GPU is joined by those that come, until it
/// is given to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Batching {
    /// The most rows (sizes of the first dimension, added up) in one run.
    pub max_size: u32,
    /// How long a request may be held back for others, while earlier ones of its function are at
    /// work. Where none is, it goes at once.
    pub max_wait: Duration,
}

/// What a function is refused for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ServingError {
    /// Batches of one, none, or too many.
    #[error(
        "batching.maxSize is {0}: write a number from 2 to {BATCH_SIZE_MAX}, or leave batching out to run each request alone"
    )]
    BatchSize(u32),
    /// A wait beyond [`BATCH_WAIT_MAX`].
    #[error("batching.maxWait {0:?} is longer than {BATCH_WAIT_MAX:?}: shorten it")]
    BatchWait(Duration),
    /// Requests that must not run twice, batched.
    #[error("batching needs idempotent: true: after a failure the requests of a batch run again, each alone")]
    BatchedOnce,
    /// More warm copies than any node has GPUs.
    #[error("residency.minWarm is {0}: write a number from 0 to {MIN_WARM_MAX}")]
    MinWarm(u32),
    /// A zero or endless time.
    #[error(
        "residency.evictAfter {0:?} is out of range: write a time above zero and up to 24h, or leave it out to keep copies until their room is needed"
    )]
    EvictAfter(Duration),
    /// Dropped and kept at once.
    #[error("residency.pin and residency.evictAfter exclude each other: leave one out")]
    PinnedAndEvicted,
}

impl Serving {
    /// Checks every field against its range; `idempotent` is the function's.
    ///
    /// # Errors
    /// The first [`ServingError`] found.
    pub fn validate(&self, idempotent: bool) -> Result<(), ServingError> {
        if let Some(Batching { max_size, max_wait }) = self.batching {
            if !(2..=BATCH_SIZE_MAX).contains(&max_size) {
                return Err(ServingError::BatchSize(max_size));
            }
            if max_wait > BATCH_WAIT_MAX {
                return Err(ServingError::BatchWait(max_wait));
            }
            if !idempotent {
                return Err(ServingError::BatchedOnce);
            }
        }
        let Residency { pin, min_warm, evict_after } = self.residency;
        if min_warm > MIN_WARM_MAX {
            return Err(ServingError::MinWarm(min_warm));
        }
        if let Some(after) = evict_after.filter(|after| after.is_zero() || *after > EVICT_AFTER_MAX) {
            return Err(ServingError::EvictAfter(after));
        }
        if pin && evict_after.is_some() {
            return Err(ServingError::PinnedAndEvicted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_steps_back_and_never_ahead() {
        let middle = Priority::default();
        let asked = |level| middle.asked(level).get();
        assert_eq!([0, 1, 4, 5, 8, 9, u64::MAX].map(asked), [4, 4, 4, 5, 8, 8, 8]);
        assert_eq!((Priority::new(0), Priority::new(9)), (None, None));
        assert_eq!(Priority::new(8), Some(Priority::LAST));
    }

    #[test]
    fn each_bad_option_is_refused() {
        let check = |residency| Serving { residency, ..Serving::default() }.validate(true);
        let residency = Residency::default();
        let batching = |max_size, max_wait| Some(Batching { max_size, max_wait });
        assert_eq!(check(residency), Ok(()));
        let good = Serving { batching: batching(8, BATCH_WAIT_MAX), ..Serving::default() };
        assert_eq!((good.validate(true), good.validate(false)), (Ok(()), Err(ServingError::BatchedOnce)));
        for size in [0, 1, BATCH_SIZE_MAX + 1] {
            let bad = Serving { batching: batching(size, Duration::ZERO), ..Serving::default() };
            assert_eq!(bad.validate(true), Err(ServingError::BatchSize(size)));
        }
        let long = BATCH_WAIT_MAX * 2;
        let bad = Serving { batching: batching(2, long), ..Serving::default() };
        assert_eq!(bad.validate(true), Err(ServingError::BatchWait(long)));
        assert_eq!(check(Residency { min_warm: 65, ..residency }), Err(ServingError::MinWarm(65)));
        for after in [Duration::ZERO, EVICT_AFTER_MAX * 2] {
            let bad = Residency { evict_after: Some(after), ..residency };
            assert_eq!(check(bad), Err(ServingError::EvictAfter(after)));
        }
        let both = Residency { pin: true, evict_after: Some(BATCH_WAIT_MAX), ..residency };
        assert_eq!(check(both), Err(ServingError::PinnedAndEvicted));
    }

    #[test]
    fn functions_with_one_model_keep_the_most_any_asks_for() {
        let one = Residency { pin: false, min_warm: 2, evict_after: Some(BATCH_WAIT_MAX) };
        let other = Residency { pin: true, min_warm: 1, evict_after: None };
        assert_eq!(one.most(other), Residency { pin: true, min_warm: 2, evict_after: None });
        assert_eq!(one.most(one), one);
    }
}
