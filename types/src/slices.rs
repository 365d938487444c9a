//! Slices of a GPU's compute: a share of the SMs for a share of the time, after FaST-GShare.
//!
//! | type | meaning |
//! |---|---|
//! | [`Permille`] | a share in thousandths: of the SMs, of the time, of a bandwidth |
//! | [`SmPercent`], [`UnitSet`], [`SmShare`] | the SMs on which a run may launch |
//! | [`Terms`] | the limits on a slice's compute (F01) |
//! | [`AskedSlices`] | the slices that a function asks for |
//!
//! Deliberately absent: the GPUs and the states of slices.

use std::fmt;
use std::num::NonZeroU8;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Number of SM units of a GPU that is divided into blocks.
pub const UNITS: u8 = 16;

/// A share in thousandths, from 0 to 1000.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Permille(u16);

impl TryFrom<u16> for Permille {
    type Error = String;

    fn try_from(thousandths: u16) -> Result<Self, String> {
        Self::new(thousandths).ok_or_else(|| format!("{thousandths} thousandths are more than the whole"))
    }
}

impl From<Permille> for u16 {
    fn from(share: Permille) -> Self {
        share.0
    }
}

impl Permille {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// The whole.
    pub const ALL: Self = Self(1000);

    /// Returns the share of so many thousandths; `None` above 1000.
    #[must_use]
    pub const fn new(thousandths: u16) -> Option<Self> {
        if thousandths <= 1000 { Some(Self(thousandths)) } else { None }
    }

    /// Returns the number of thousandths.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns this share of a time, rounded down to a nanosecond.
    #[must_use]
    pub fn of(self, whole: Duration) -> Duration {
        let nanos = whole.as_nanos().saturating_mul(u128::from(self.0)) / 1000;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Parses a share of the SMs as FaSTPod has it: `12`, `12%` or `0.12`. A plain number above 1 is a percentage; a
    /// plain 1 is refused, because it could be 1% or all.
    ///
    /// # Errors
    ///
    /// Fails unless the text is a number of at most 100%, with at most one decimal of a percent.
    pub fn parse_sm(text: &str) -> Result<Self, ParseShareError> {
        let wrong = || ParseShareError::Sm(text.to_owned());
        let (number, percent) = number_of(text).ok_or_else(wrong)?;
        if !percent && number == 1.0 {
            return Err(ParseShareError::SmOne(text.to_owned()));
        }
        let thousandths = if percent || number > 1.0 { number * 10.0 } else { number * 1000.0 };
        Self::from_thousandths(thousandths).ok_or_else(wrong)
    }

    /// Parses a quota of the time as FaSTPod has it: `0.3` or `30%`. A plain number is a fraction, so 1 is 100%.
    ///
    /// # Errors
    ///
    /// Fails unless the text is a number of at most 100%, with at most one decimal of a percent.
    pub fn parse_quota(text: &str) -> Result<Self, ParseShareError> {
        let wrong = || ParseShareError::Quota(text.to_owned());
        let (number, percent) = number_of(text).ok_or_else(wrong)?;
        Self::from_thousandths(number * if percent { 10.0 } else { 1000.0 }).ok_or_else(wrong)
    }

    fn from_thousandths(thousandths: f64) -> Option<Self> {
        let whole = thousandths.round();
        let exact = (thousandths - whole).abs() < 1e-6 && (0.0..=1000.0).contains(&whole);
        exact.then_some(Self(whole as u16))
    }
}

/// Returns a finite number, and whether a percent sign follows.
fn number_of(text: &str) -> Option<(f64, bool)> {
    let text = text.trim();
    let (digits, percent) = match text.strip_suffix('%') {
        Some(digits) => (digits.trim_end(), true),
        None => (text, false),
    };
    let number: f64 = digits.parse().ok()?;
    number.is_finite().then_some((number, percent))
}

/// Displays a percentage: `12%`, `12.5%`.
impl fmt::Display for Permille {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 10 {
            0 => f.pad(&format!("{}%", self.0 / 10)),
            tenths => f.pad(&format!("{}.{tenths}%", self.0 / 10)),
        }
    }
}

/// The error for a text that is not a share; holds the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseShareError {
    /// The text is not a share of the SMs.
    #[error("{0:?} is not a share of the SMs: write a percentage from 0.1% to 100%, such as 12%")]
    Sm(String),
    /// The text is a plain 1.
    #[error("{0:?} may be 1% or all of the SMs: write 1% or 100%")]
    SmOne(String),
    /// The text is not a quota of the time.
    #[error("{0:?} is not a quota of the time: write a fraction from 0 to 1, such as 0.3 or 30%")]
    Quota(String),
}

/// A percentage of a GPU's SMs, from 1 to 100, as MPS has it; not the sixteenths of [`UNITS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SmPercent(NonZeroU8);

impl SmPercent {
    /// Returns the percentage; `None` unless the number is from 1 to 100.
    #[must_use]
    pub const fn new(percent: u8) -> Option<Self> {
        match NonZeroU8::new(percent) {
            Some(percent) if percent.get() <= 100 => Some(Self(percent)),
            _ => None,
        }
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0.get()
    }
}

/// An aligned block of 1, 2, 4, 8 or 16 of the [`UNITS`] of a GPU: the block starts at a multiple of the width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitSet(u16);

impl UnitSet {
    /// The whole GPU.
    pub const ALL: Self = Self(u16::MAX);

    /// Returns the block of `width` units from `first` on; `None` unless the block is aligned and on the GPU.
    #[must_use]
    pub const fn block(first: u8, width: u8) -> Option<Self> {
        if !width.is_power_of_two() || width > UNITS || first >= UNITS || !first.is_multiple_of(width) {
            return None;
        }
        Some(Self((u16::MAX >> (UNITS - width)) << first))
    }

    /// Returns the first unit of the block, from 0.
    #[must_use]
    pub const fn first(self) -> u8 {
        self.0.trailing_zeros() as u8
    }

    /// Returns the number of units of the block.
    #[must_use]
    pub const fn width(self) -> u8 {
        self.0.count_ones() as u8
    }

    /// Returns a bit for each unit, the first unit lowest.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }
}

/// The SMs of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SmShare {
    /// A block of units that no other run has at the same time.
    Block(UnitSet),
    /// At most so many percent of the SMs, on no certain SMs: a percentage of MPS.
    Cap(SmPercent),
}

impl SmShare {
    /// Returns the number of units: of 16 for a block, of 100 for a percentage.
    #[must_use]
    pub const fn units(self) -> u8 {
        match self {
            Self::Block(block) => block.width(),
            Self::Cap(percent) => percent.get(),
        }
    }

    /// Returns the number of units that are the whole GPU: 16, or 100.
    #[must_use]
    pub const fn whole(self) -> u8 {
        match self {
            Self::Block(_) => UNITS,
            Self::Cap(_) => 100,
        }
    }
}

/// Identifier of a slice. An identifier is never used again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SliceId(pub u64);

impl fmt::Display for SliceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The checked limits on the compute of a slice: the SM partition and the quotas of a FaSTPod (F01).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "TermsText", into = "TermsText")]
pub struct Terms {
    least: Permille,
    most: Permille,
    request: Permille,
    limit: Permille,
}

impl Terms {
    /// Checks the limits of a slice that computes on `least` to `most` of the SMs, for `request` of the time
    /// whenever the slice wants to, and never for more than `limit` of the time.
    ///
    /// # Errors
    ///
    /// Fails unless `0 < least <= most` and `request <= limit` and `0 < limit`.
    pub fn new(
        least: Permille,
        most: Permille,
        request: Permille,
        limit: Permille,
    ) -> Result<Self, TermsError> {
        if least == Permille::ZERO {
            return Err(TermsError::NoSms);
        }
        if least > most {
            return Err(TermsError::LeastAboveMost { least, most });
        }
        if limit == Permille::ZERO {
            return Err(TermsError::NoTime);
        }
        if request > limit {
            return Err(TermsError::RequestAboveLimit { request, limit });
        }
        Ok(Self { least, most, request, limit })
    }

    /// Returns the least share of the SMs on which the slice computes.
    #[must_use]
    pub const fn least(self) -> Permille {
        self.least
    }

    /// Returns the greatest share of the SMs on which the slice computes; equal to the least for a partition in
    /// the paper's sense.
    #[must_use]
    pub const fn most(self) -> Permille {
        self.most
    }

    /// Returns the guaranteed share of the time: the paper's `Q_request`.
    #[must_use]
    pub const fn request(self) -> Permille {
        self.request
    }

    /// Returns the greatest share of the time: the paper's `Q_limit`.
    #[must_use]
    pub const fn limit(self) -> Permille {
        self.limit
    }
}

/// [`Terms`] as stored, not yet checked.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Terms")]
struct TermsText {
    least: Permille,
    most: Permille,
    request: Permille,
    limit: Permille,
}

impl TryFrom<TermsText> for Terms {
    type Error = TermsError;

    fn try_from(text: TermsText) -> Result<Self, TermsError> {
        Self::new(text.least, text.most, text.request, text.limit)
    }
}

impl From<Terms> for TermsText {
    fn from(Terms { least, most, request, limit }: Terms) -> Self {
        Self { least, most, request, limit }
    }
}

/// Displays the shares: `12%..50% of the SMs, 30%..80% of the time`.
impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { least, most, request, limit } = self;
        match least == most {
            true => write!(f, "{least} of the SMs")?,
            false => write!(f, "{least}..{most} of the SMs")?,
        }
        write!(f, ", {request}..{limit} of the time")
    }
}

/// Maximum number of slices that a function asks for.
pub const ASKED_SLICES_MAX: u32 = 64;

/// The slices that a function asks for. On GPUs that are shared, the function then computes in these
/// slices alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AskedSlices {
    /// The terms of each slice.
    pub terms: Terms,
    /// The least number of slices, from 1 to [`ASKED_SLICES_MAX`].
    pub min: u32,
    /// The greatest number of slices, from `min` to [`ASKED_SLICES_MAX`]; `None`: always the least number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
}

impl AskedSlices {
    /// Returns a fixed number of slices.
    #[must_use]
    pub const fn fixed(terms: Terms, count: u32) -> Self {
        Self { terms, min: count, max: None }
    }

    /// Returns the greatest number of slices, if the number follows the load.
    #[must_use]
    pub fn scaled_max(&self) -> Option<u32> {
        self.max.filter(|&max| max > self.min)
    }
}

/// The fault of refused [`Terms`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TermsError {
    /// The slice has no SMs.
    #[error("the SM partition is 0%: write a share from 0.1% to 100%")]
    NoSms,
    /// The least share of the SMs is above the greatest share.
    #[error("the least SM partition {least} is above the greatest {most}: write the smaller share first")]
    LeastAboveMost {
        /// The least share of the SMs.
        least: Permille,
        /// The greatest share of the SMs.
        most: Permille,
    },
    /// The slice may never compute.
    #[error("the quota limit is 0%: write a fraction above 0, such as 0.8")]
    NoTime,
    /// The slice is guaranteed more time than its limit.
    #[error(
        "the quota request {request} is above the quota limit {limit}: lower the request or raise the limit"
    )]
    RequestAboveLimit {
        /// The guaranteed share of the time.
        request: Permille,
        /// The greatest share of the time.
        limit: Permille,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(thousandths: u16) -> Permille {
        Permille::new(thousandths).unwrap()
    }

    fn terms(least: u16, most: u16, request: u16, limit: u16) -> Result<Terms, TermsError> {
        Terms::new(share(least), share(most), share(request), share(limit))
    }

    #[test]
    fn sm_partitions_are_percentages_and_quotas_are_fractions() {
        let sm = |text| Permille::parse_sm(text).map(Permille::get);
        assert_eq!([sm("12"), sm("12%"), sm("0.12"), sm("1%")], [Ok(120), Ok(120), Ok(120), Ok(10)]);
        assert!(sm("1").unwrap_err().to_string().contains("write 1% or 100%"));
        assert_eq!(sm("1.0"), Err(ParseShareError::SmOne("1.0".to_owned())));
        assert_eq!(sm("12.5 %"), Ok(125));
        let quota = |text| Permille::parse_quota(text).map(Permille::get);
        assert_eq!([quota("0.3"), quota("30%"), quota("1"), quota("0")], [Ok(300), Ok(300), Ok(1000), Ok(0)]);
        for wrong in ["", "x", "101", "-1", "NaN", "inf", "0.12345", "100.1%"] {
            let message = Permille::parse_sm(wrong).unwrap_err().to_string();
            assert!(message.contains("such as 12"), "{message}");
        }
        for wrong in ["1.2", "30", "120%", "-0.1", "0.00001"] {
            let message = Permille::parse_quota(wrong).unwrap_err().to_string();
            assert!(message.contains("such as 0.3"), "{message}");
        }
    }

    #[test]
    fn shares_display_as_percentages_and_scale_times() {
        assert_eq!(share(120).to_string(), "12%");
        assert_eq!(share(125).to_string(), "12.5%");
        assert_eq!(share(300).of(Duration::from_secs(1)), Duration::from_millis(300));
        assert_eq!(Permille::new(1001), None);
    }

    #[test]
    fn blocks_are_aligned_and_stay_on_the_gpu() {
        assert_eq!(UnitSet::block(0, 16), Some(UnitSet::ALL));
        let block = UnitSet::block(12, 4).unwrap();
        assert_eq!((block.first(), block.width(), block.bits()), (12, 4, 0xf000));
        for (first, width) in [(2, 4), (0, 3), (16, 1), (0, 0), (8, 16), (0, 32)] {
            assert_eq!(UnitSet::block(first, width), None, "{first} {width}");
        }
    }

    #[test]
    fn percentages_are_from_1_to_100() {
        assert_eq!([SmPercent::new(0), SmPercent::new(101)], [None, None]);
        assert_eq!(SmPercent::new(100).map(SmPercent::get), Some(100));
    }

    #[test]
    fn terms_are_accepted_at_their_bounds() {
        for (least, most, request, limit) in [(1, 1, 0, 1), (120, 500, 300, 800), (1000, 1000, 1000, 1000)] {
            assert!(terms(least, most, request, limit).is_ok());
        }
    }

    #[test]
    fn terms_outside_their_bounds_are_refused_with_advice() {
        for (refused, advice) in [
            (terms(0, 0, 0, 1000), "from 0.1% to 100%"),
            (terms(500, 120, 0, 1000), "smaller share first"),
            (terms(120, 120, 0, 0), "above 0"),
            (
                terms(120, 120, 800, 300),
                "the quota request 80% is above the quota limit 30%: lower the request",
            ),
        ] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(advice), "{message}");
        }
    }
}
