//! Quantities that carry their unit.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A size of memory or data, in bytes. Parses `64MiB`, `1.5GB` and `4096`; displays binary units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// Creates a size of `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// Creates a size of `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns `self - other`, or zero if `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&bytesize::ByteSize(self.0).display().iec().to_string())
    }
}

/// The error for a text that is not a size; holds the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size: write a number and a unit, such as 512MiB or 2GiB")]
pub struct ParseBytesError(pub String);

impl FromStr for Bytes {
    type Err = ParseBytesError;
    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        let size: bytesize::ByteSize = text.parse().map_err(|_| ParseBytesError(text.to_owned()))?;
        Ok(Self(size.as_u64()))
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        Self(sizes.map(|size| size.0).sum())
    }
}

/// A transfer rate in bytes per second. A rate of zero never divides: see
/// [`BytesPerSec::time_for`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BytesPerSec(pub u64);

impl BytesPerSec {
    /// Creates a rate of `n` decimal gigabytes a second, the unit of link data sheets.
    #[must_use]
    pub const fn gb(n: u64) -> Self {
        Self(n * 1_000_000_000)
    }

    /// Returns the time that `size` takes at this rate, rounded up to a nanosecond;
    /// [`Duration::MAX`] at rate 0.
    #[must_use]
    pub fn time_for(self, size: Bytes) -> Duration {
        if self.0 == 0 {
            return Duration::MAX;
        }
        let nanos = (u128::from(size.0) * 1_000_000_000).div_ceil(u128::from(self.0));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for BytesPerSec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} GB/s", self.0 as f64 / 1e9)
    }
}

/// A point in time on one machine's monotonic clock or a simulator's clock, in nanoseconds since
/// that clock's zero. A timestamp is never sent to another machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The clock's zero.
    pub const ZERO: Self = Self(0);
    /// The latest possible time.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns the nanoseconds since the clock's zero.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_units_and_display_in_binary_units() {
        assert_eq!("64MiB".parse(), Ok(Bytes::mib(64)));
        assert_eq!("2 GiB".parse(), Ok(Bytes::gib(2)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        assert!("many".parse::<Bytes>().is_err());
        assert_eq!(Bytes::gib(4).to_string(), "4.0 GiB");
    }

    #[test]
    fn transfer_time_rounds_up_and_is_the_maximum_at_rate_zero() {
        assert_eq!(BytesPerSec::gb(12).time_for(Bytes(12)), Duration::from_nanos(1));
        assert_eq!(BytesPerSec::gb(12).time_for(Bytes(13)), Duration::from_nanos(2));
        assert_eq!(BytesPerSec(0).time_for(Bytes(1)), Duration::MAX);
    }

    #[test]
    fn timestamps_saturate_instead_of_wrapping() {
        assert_eq!(Timestamp::MAX + Duration::from_secs(1), Timestamp::MAX);
        assert_eq!(Timestamp(1).since(Timestamp(5)), Duration::ZERO);
    }
}
