//! What nodes count and replicas agree on: scores against an objective, and the share of prioritised
//! requests. Whole numbers, so that sums are exact.

use serde::{Deserialize, Serialize};

/// A function's score: `n` requests finished or expired, `m` of them within the deadline (T17).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct SloCounts {
    /// Served in time.
    pub m: u64,
    /// Finished or expired.
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
    /// Both counts, added up.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self { m: self.m.saturating_add(other.m), n: self.n.saturating_add(other.n) }
    }

    /// What was counted since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self { m: self.m.saturating_sub(earlier.m), n: self.n.saturating_sub(earlier.n) }
    }

    /// The larger of each count: the later of two cumulative reports, in whatever order they come.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self { m: self.m.max(other.m), n: self.n.max(other.n) }
    }
}

/// What a placement adds to the counts its node reports: what replicas that are gone have counted,
/// less what of the node's own counts was handed on already when it lost the function before. So it
/// may be negative, and its sum with the node's counts never is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(i64, i64)", into = "(i64, i64)")]
pub struct SloBase {
    /// Added to the node's m.
    pub m: i64,
    /// Added to the node's n.
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
    /// The score that a replica goes by: the node's own counts on top of the base.
    #[must_use]
    pub const fn effective(self, counts: SloCounts) -> SloCounts {
        SloCounts { m: counts.m.saturating_add_signed(self.m), n: counts.n.saturating_add_signed(self.n) }
    }

    /// The base under which `counts` come out as nothing.
    #[must_use]
    pub const fn settling(counts: SloCounts) -> Self {
        Self { m: 0i64.saturating_sub_unsigned(counts.m), n: 0i64.saturating_sub_unsigned(counts.n) }
    }

    /// The base with what others have counted on top.
    #[must_use]
    pub const fn plus(self, counts: SloCounts) -> Self {
        Self { m: self.m.saturating_add_unsigned(counts.m), n: self.n.saturating_add_unsigned(counts.n) }
    }
}

/// The share of the required request count that goes into the high-priority queue (Torpor §4.3), in
/// millionths: exact, so that replicas agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Alpha(u32);

/// A share above one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("alpha is {0} millionths: a share is at most 1,000,000")]
pub struct AlphaError(pub u32);

impl Alpha {
    /// The whole count is prioritised.
    pub const ONE: Self = Self(1_000_000);

    /// Takes a share in millionths.
    ///
    /// # Errors
    /// [`AlphaError`] above one.
    pub const fn from_ppm(ppm: u32) -> Result<Self, AlphaError> {
        if ppm <= Self::ONE.0 { Ok(Self(ppm)) } else { Err(AlphaError(ppm)) }
    }

    /// The share in millionths.
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
    type Error = AlphaError;
    fn try_from(ppm: u32) -> Result<Self, AlphaError> {
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
    fn a_base_may_be_negative_and_its_score_never_is() {
        let counts = SloCounts { m: 7, n: 9 };
        let settled = SloBase::settling(counts);
        assert_eq!(settled.effective(counts), SloCounts::default());
        let inherited = settled.plus(SloCounts { m: 2, n: 3 });
        assert_eq!(inherited, SloBase { m: -5, n: -6 });
        assert_eq!(inherited.effective(SloCounts { m: 8, n: 10 }), SloCounts { m: 3, n: 4 });
        assert_eq!(settled.effective(SloCounts::default()), SloCounts::default());
    }

    #[test]
    fn alpha_is_a_share() {
        assert_eq!(Alpha::from_ppm(1_000_000), Ok(Alpha::ONE));
        assert_eq!(Alpha::from_ppm(1_000_001), Err(AlphaError(1_000_001)));
        assert!(serde_saphyr::from_str::<Alpha>("1000001").is_err());
    }
}
