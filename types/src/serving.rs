//! Scheduling options of a function on a node: priority, residency on GPUs, and batching. The
//! papers' share of these options is in docs/develop/mechanisms.md, L15 and L22. The rest follows Triton's
//! `dynamic_batching` and `priority_levels`, so that knowledge of Triton applies here.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum size of a batch, in requests or rows of requests.
pub const BATCH_SIZE_MAX: u32 = 64;
/// The longest time that a request may wait for others to join its batch.
pub const BATCH_WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum number of copies of a model that a node may be asked to keep on its GPUs.
pub const MIN_WARM_MAX: u32 = 64;
/// The longest time after which an unused copy may be evicted: a day.
pub const EVICT_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// The scheduling options of a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SchedulingOptions {
    /// The priority of the function's requests.
    #[serde(default)]
    pub priority: Priority,
    /// The rules for copies of the model on GPUs.
    #[serde(default)]
    pub residency: ResidencyOptions,
    /// The batching of the function's requests; with `None`, each request runs alone.
    #[serde(default)]
    pub batching: Option<BatchingOptions>,
}

/// The priority of requests: 1 before 2, up to [`Priority::LAST`]. A request of a higher priority
/// leaves the queue before all requests of lower priority that could use the same GPU. A request
/// never stops a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Priority(u8);

impl Priority {
    /// The highest priority.
    pub const FIRST: Self = Self(1);
    /// The lowest priority.
    pub const LAST: Self = Self(8);

    /// Creates a priority from its number. Returns `None` if there is no such priority.
    #[must_use]
    pub fn new(level: u64) -> Option<Self> {
        let level = u8::try_from(level).ok()?;
        (Self::FIRST.0..=Self::LAST.0).contains(&level).then_some(Self(level))
    }

    /// Returns the priority's number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns the effective priority of a request that asks for `level` of a function with this
    /// priority. A request may lower its priority but never raise it above the function's. 0 asks
    /// for the function's priority, and a number above the last means the last.
    #[must_use]
    pub fn asked(self, level: u64) -> Self {
        let asked = u8::try_from(level).map_or(Self::LAST.0, |level| level.min(Self::LAST.0));
        Self(self.0.max(asked))
    }
}

/// The default is the middle, which leaves levels on both sides.
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

/// The rules for copies of a model on the GPUs of each node that has the model. If functions share
/// a model, the strongest of their rules applies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResidencyOptions {
    /// Whether the copies are pinned: evicted only if evicting all other models on the GPU does not
    /// free enough memory.
    #[serde(default)]
    pub pin: bool,
    /// The number of the node's GPUs that hold the model even without requests. A copy is loaded as
    /// soon as a GPU is idle and has memory beside the models kept there. The copy is then kept
    /// like a pinned copy.
    #[serde(default)]
    pub min_warm: u32,
    /// The time without use after which a copy is evicted, even if no other model needs the memory.
    /// `None` means never.
    #[serde(default)]
    pub evict_after: Option<Duration>,
}

impl ResidencyOptions {
    /// Returns the rules for a model that two functions share.
    #[must_use]
    pub fn most(self, other: Self) -> Self {
        let evict_after = match (self.evict_after, other.evict_after) {
            (Some(one), Some(other)) => Some(one.max(other)),
            _ => None,
        };
        Self { pin: self.pin || other.pin, min_warm: self.min_warm.max(other.min_warm), evict_after }
    }
}

/// The batching of a function's requests. Requests can run as one batch if their inputs differ at
/// most in the first dimension and they ask for the same outputs. Arriving requests join a waiting
/// batch until the batch is assigned to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BatchingOptions {
    /// Maximum number of rows (the sum of the first dimensions) in a run.
    pub max_size: u32,
    /// The longest time that a request waits for others while an earlier batch of the function waits for a
    /// GPU or is on one. Without such a batch, the request is queued for a GPU at once.
    pub max_wait: Duration,
}

/// The fault of refused scheduling options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SchedulingOptionsError {
    /// The batch size is below 2 or exceeds [`BATCH_SIZE_MAX`].
    #[error(
        "batching.maxSize is {0}: write a number from 2 to {BATCH_SIZE_MAX}, or leave batching out to run each request alone"
    )]
    BatchSize(u32),
    /// The wait exceeds [`BATCH_WAIT_MAX`].
    #[error("batching.maxWait {0:?} is longer than {BATCH_WAIT_MAX:?}: shorten it")]
    BatchWait(Duration),
    /// Batching is set for a function that is not idempotent.
    #[error("batching needs idempotent: true: after a failure the requests of a batch run again, each alone")]
    BatchedOnce,
    /// The number of warm copies exceeds [`MIN_WARM_MAX`].
    #[error("residency.minWarm is {0}: write a number from 0 to {MIN_WARM_MAX}")]
    MinWarm(u32),
    /// The eviction time is zero or exceeds [`EVICT_AFTER_MAX`].
    #[error(
        "residency.evictAfter {0:?} is out of range: write a time above zero and up to 24h, or leave evictAfter out to keep copies until their memory is needed"
    )]
    EvictAfter(Duration),
    /// Both pinning and an eviction time are set, which contradict each other.
    #[error("residency.pin and residency.evictAfter exclude each other: leave one out")]
    PinnedAndEvicted,
}

impl SchedulingOptions {
    /// Checks every field against its range. `idempotent` is the function's own setting.
    ///
    /// # Errors
    /// The first [`SchedulingOptionsError`] found.
    pub fn validate(&self, idempotent: bool) -> Result<(), SchedulingOptionsError> {
        if let Some(BatchingOptions { max_size, max_wait }) = self.batching {
            if !(2..=BATCH_SIZE_MAX).contains(&max_size) {
                return Err(SchedulingOptionsError::BatchSize(max_size));
            }
            if max_wait > BATCH_WAIT_MAX {
                return Err(SchedulingOptionsError::BatchWait(max_wait));
            }
            if !idempotent {
                return Err(SchedulingOptionsError::BatchedOnce);
            }
        }
        let ResidencyOptions { pin, min_warm, evict_after } = self.residency;
        if min_warm > MIN_WARM_MAX {
            return Err(SchedulingOptionsError::MinWarm(min_warm));
        }
        if let Some(after) = evict_after.filter(|after| after.is_zero() || *after > EVICT_AFTER_MAX) {
            return Err(SchedulingOptionsError::EvictAfter(after));
        }
        if pin && evict_after.is_some() {
            return Err(SchedulingOptionsError::PinnedAndEvicted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_may_lower_its_priority_and_never_raise_it() {
        let middle = Priority::default();
        let asked = |level| middle.asked(level).get();
        assert_eq!([0, 1, 4, 5, 8, 9, u64::MAX].map(asked), [4, 4, 4, 5, 8, 8, 8]);
        assert_eq!((Priority::new(0), Priority::new(9)), (None, None));
        assert_eq!(Priority::new(8), Some(Priority::LAST));
    }

    #[test]
    fn bad_scheduling_options_are_refused() {
        let check =
            |residency| SchedulingOptions { residency, ..SchedulingOptions::default() }.validate(true);
        let residency = ResidencyOptions::default();
        let batching = |max_size, max_wait| Some(BatchingOptions { max_size, max_wait });
        assert_eq!(check(residency), Ok(()));
        let good =
            SchedulingOptions { batching: batching(8, BATCH_WAIT_MAX), ..SchedulingOptions::default() };
        assert_eq!(
            (good.validate(true), good.validate(false)),
            (Ok(()), Err(SchedulingOptionsError::BatchedOnce))
        );
        for size in [0, 1, BATCH_SIZE_MAX + 1] {
            let bad = SchedulingOptions {
                batching: batching(size, Duration::ZERO),
                ..SchedulingOptions::default()
            };
            assert_eq!(bad.validate(true), Err(SchedulingOptionsError::BatchSize(size)));
        }
        let long = BATCH_WAIT_MAX * 2;
        let bad = SchedulingOptions { batching: batching(2, long), ..SchedulingOptions::default() };
        assert_eq!(bad.validate(true), Err(SchedulingOptionsError::BatchWait(long)));
        assert_eq!(
            check(ResidencyOptions { min_warm: 65, ..residency }),
            Err(SchedulingOptionsError::MinWarm(65))
        );
        for after in [Duration::ZERO, EVICT_AFTER_MAX * 2] {
            let bad = ResidencyOptions { evict_after: Some(after), ..residency };
            assert_eq!(check(bad), Err(SchedulingOptionsError::EvictAfter(after)));
        }
        let both = ResidencyOptions { pin: true, evict_after: Some(BATCH_WAIT_MAX), ..residency };
        assert_eq!(check(both), Err(SchedulingOptionsError::PinnedAndEvicted));
    }

    #[test]
    fn functions_that_share_a_model_get_the_strongest_residency() {
        let one = ResidencyOptions { pin: false, min_warm: 2, evict_after: Some(BATCH_WAIT_MAX) };
        let other = ResidencyOptions { pin: true, min_warm: 1, evict_after: None };
        assert_eq!(one.most(other), ResidencyOptions { pin: true, min_warm: 2, evict_after: None });
        assert_eq!(one.most(one), one);
    }
}
