//! Counts that nodes keep and replicas agree on: SLO counts of functions, and the share of
//! prioritised requests. All counts are whole numbers, so that sums are exact.

use serde::{Deserialize, Serialize};

/// A function's SLO counts: `n` requests finished or expired, of which `m` met the deadline (T17).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct SloCounts {
    /// Requests answered within the deadline.
    pub m: u64,
    /// Requests finished or expired.
    pub n: u64,
}

impl From<(u64, u64)> for SloCounts {
    fn from((m, n): (u64, u64)) -> Self {
        Self { m, n }
    }
}

impl From<SloCounts> for (u64, u64) {
    fn from(counts: SloCounts) -> Self {
        (counts.m, counts.n)
    }
}

impl SloCounts {
    /// Returns the sum of both counts.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self { m: self.m.saturating_add(other.m), n: self.n.saturating_add(other.n) }
    }

    /// Returns the requests counted since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self { m: self.m.saturating_sub(earlier.m), n: self.n.saturating_sub(earlier.n) }
    }

    /// Returns the larger value of each count. Of two cumulative reports this is the later one,
    /// whichever arrived first.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self { m: self.m.max(other.m), n: self.n.max(other.n) }
    }
}

/// The offset that a placement adds to the SLO counts that its node reports. The offset holds the
/// counts of replicas that are gone, less those of the node's own counts that were handed on when
/// the node lost the function before. The offset may be negative; its sum with the node's counts is
/// at least zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(i64, i64)", into = "(i64, i64)")]
pub struct SloBase {
    /// The offset of the node's `m`.
    pub m: i64,
    /// The offset of the node's `n`.
    pub n: i64,
}

impl From<(i64, i64)> for SloBase {
    fn from((m, n): (i64, i64)) -> Self {
        Self { m, n }
    }
}

impl From<SloBase> for (i64, i64) {
    fn from(base: SloBase) -> Self {
        (base.m, base.n)
    }
}

impl SloBase {
    /// Returns the SLO counts that a replica schedules by: the node's own counts plus the base.
    #[must_use]
    pub const fn effective(self, counts: SloCounts) -> SloCounts {
        SloCounts { m: counts.m.saturating_add_signed(self.m), n: counts.n.saturating_add_signed(self.n) }
    }

    /// Returns the base whose sum with `counts` is zero.
    #[must_use]
    pub const fn settling(counts: SloCounts) -> Self {
        Self { m: 0i64.saturating_sub_unsigned(counts.m), n: 0i64.saturating_sub_unsigned(counts.n) }
    }

    /// Returns the base plus the counts of other replicas.
    #[must_use]
    pub const fn plus(self, counts: SloCounts) -> Self {
        Self { m: self.m.saturating_add_unsigned(counts.m), n: self.n.saturating_add_unsigned(counts.n) }
    }
}

/// The fraction of the required request count that enters the high-priority queue (Torpor §4.3), in
/// millionths. The integer is exact, so that replicas agree on the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Alpha(u32);

/// The error for a share above one; holds the rejected share in millionths.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("alpha is {0} millionths: a share is at most 1,000,000")]
pub struct PrioritisedShareError(pub u32);

impl Alpha {
    /// The whole request count is prioritised.
    pub const ONE: Self = Self(1_000_000);

    /// Creates a share from millionths.
    ///
    /// # Errors
    /// [`PrioritisedShareError`] if the share is above one.
    pub const fn from_ppm(ppm: u32) -> Result<Self, PrioritisedShareError> {
        if ppm <= Self::ONE.0 { Ok(Self(ppm)) } else { Err(PrioritisedShareError(ppm)) }
    }

    /// Returns the share in millionths.
    #[must_use]
    pub const fn ppm(self) -> u32 {
        self.0
    }
}

impl Default for Alpha {
    fn default() -> Self {
        Self::ONE
    }
}

impl TryFrom<u32> for Alpha {
    type Error = PrioritisedShareError;
    fn try_from(ppm: u32) -> Result<Self, PrioritisedShareError> {
        Self::from_ppm(ppm)
    }
}

impl From<Alpha> for u32 {
    fn from(alpha: Alpha) -> Self {
        alpha.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_base_may_be_negative_and_effective_counts_never_are() {
        let counts = SloCounts { m: 7, n: 9 };
        let settled = SloBase::settling(counts);
        assert_eq!(settled.effective(counts), SloCounts::default());
        let inherited = settled.plus(SloCounts { m: 2, n: 3 });
        assert_eq!(inherited, SloBase { m: -5, n: -6 });
        assert_eq!(inherited.effective(SloCounts { m: 8, n: 10 }), SloCounts { m: 3, n: 4 });
        assert_eq!(settled.effective(SloCounts::default()), SloCounts::default());
    }

    #[test]
    fn an_alpha_above_one_is_refused() {
        assert_eq!(Alpha::from_ppm(1_000_000), Ok(Alpha::ONE));
        assert_eq!(Alpha::from_ppm(1_000_001), Err(PrioritisedShareError(1_000_001)));
        assert!(serde_saphyr::from_str::<Alpha>("1000001").is_err());
    }
}
