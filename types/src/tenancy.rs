//! The caps on a tenant (L20). The caps apply on each node separately: a node knows its running and
//! recent requests, and asks no other node.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A fraction of a whole in millionths, above 0 and at most 1. The integer is exact, so that
/// replicas agree on the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct ResourceShare(NonZeroU32);

/// The error for a share that is zero or above one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a share is above 0 and at most 1, such as 0.5")]
pub struct ShareError;

impl ResourceShare {
    /// The whole.
    pub const ALL: Self = Self(NonZeroU32::new(1_000_000).expect("a million is not zero"));

    /// Creates a share from millionths.
    ///
    /// # Errors
    /// [`ShareError`] if the share is zero or above one.
    pub const fn from_ppm(ppm: u32) -> Result<Self, ShareError> {
        match NonZeroU32::new(ppm) {
            Some(ppm) if ppm.get() <= Self::ALL.ppm() => Ok(Self(ppm)),
            _ => Err(ShareError),
        }
    }

    /// Creates a share from a fraction of 1, rounded to millionths. A fraction below a millionth
    /// becomes a millionth.
    ///
    /// # Errors
    /// [`ShareError`] if the fraction is zero, negative, above one or not a number.
    pub fn from_fraction(fraction: f64) -> Result<Self, ShareError> {
        // Checked before the rounding: a value in range fits into `u32`.
        let ppm = (fraction > 0.0 && fraction <= 1.0).then(|| (fraction * 1e6).round() as u32);
        Self::from_ppm(ppm.ok_or(ShareError)?.max(1))
    }

    /// Returns the share as a fraction of 1.
    #[must_use]
    pub fn fraction(self) -> f64 {
        f64::from(self.ppm()) / f64::from(Self::ALL.ppm())
    }

    /// Returns the share in millionths.
    #[must_use]
    pub const fn ppm(self) -> u32 {
        self.0.get()
    }

    /// Returns this share of `whole`, rounded down.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        let part = u128::from(whole) * u128::from(self.ppm()) / u128::from(Self::ALL.ppm());
        u64::try_from(part).unwrap_or(u64::MAX)
    }
}

impl TryFrom<u32> for ResourceShare {
    type Error = ShareError;
    fn try_from(ppm: u32) -> Result<Self, ShareError> {
        Self::from_ppm(ppm)
    }
}

impl From<ResourceShare> for u32 {
    fn from(share: ResourceShare) -> Self {
        share.ppm()
    }
}

impl fmt::Display for ResourceShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.fraction())
    }
}

impl FromStr for ResourceShare {
    type Err = ShareError;
    fn from_str(text: &str) -> Result<Self, ShareError> {
        Self::from_fraction(text.parse().map_err(|_| ShareError)?)
    }
}

/// The caps on a tenant's functions on each node. A field that is `None` sets no cap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Quota {
    /// Maximum number of GPUs that work on the tenant's requests at once. Never exceeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus_max: Option<NonZeroU32>,
    /// Share of the node's GPUs, and of their time in the last ten seconds. A tenant may exceed its share
    /// only on GPUs that tenants within their shares neither wait for nor needed in the last ten seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_share: Option<ResourceShare>,
    /// Share of the GPUs' memory for the models of the tenant's running requests. Never exceeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_share: Option<ResourceShare>,
}

impl Quota {
    /// No caps.
    pub const NONE: Self = Self { gpus_max: None, gpu_share: None, memory_share: None };

    /// Returns whether no cap is set.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_zero_or_above_one_is_refused() {
        assert_eq!(ResourceShare::from_ppm(0), Err(ShareError));
        assert_eq!(ResourceShare::from_ppm(1_000_001), Err(ShareError));
        let half = ResourceShare::from_ppm(500_000).unwrap();
        assert_eq!(
            (half.of(7), half.of(u64::MAX), ResourceShare::ALL.of(u64::MAX)),
            (3, u64::MAX / 2, u64::MAX)
        );
        assert_eq!(("0.5".parse(), "1".parse()), (Ok(half), Ok(ResourceShare::ALL)));
        assert_eq!("0.0000001".parse::<ResourceShare>().map(ResourceShare::ppm), Ok(1));
        for none in ["", "half", "0", "-0.5", "1.01", "NaN", "inf"] {
            assert_eq!(none.parse::<ResourceShare>(), Err(ShareError), "{none}");
        }
        assert_eq!((half.to_string(), ResourceShare::ALL.to_string()), ("0.5".into(), "1".into()));
    }
}
