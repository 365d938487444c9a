//! The values that a check measured, and what was expected of them.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cuda::DriverMissing;
use crate::error::{DriverError, Error};

/// Reason why a check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// There is no usable driver.
    #[error(transparent)]
    Missing(#[from] DriverMissing),
    /// The driver refused a call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The device refused a call.
    #[error(transparent)]
    Device(#[from] Error),
    /// A system call failed, for example to start another process.
    #[error("{0}")]
    Os(#[from] std::io::Error),
    /// The GPU did something that is wrong.
    #[error("{0}")]
    Wrong(String),
}

impl From<rustix::io::Errno> for CheckError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Os(errno.into())
    }
}

/// The bounds of a value, both inclusive, written down before the first measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// Smallest expected value.
    pub least: f64,
    /// Largest expected value.
    pub most: f64,
}

/// A measured value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Name of the measured quantity.
    pub name: String,
    /// The value.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
    /// Ceiling that was measured in the same process, in the same unit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ceiling: Option<f64>,
    /// What was expected: of the ratio to the ceiling if there is one, else of the value.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub expected: Option<Expectation>,
}

impl Value {
    /// Returns the part of the ceiling that was reached.
    #[must_use]
    pub fn ratio(&self) -> Option<f64> {
        self.ceiling.map(|ceiling| self.value / ceiling)
    }

    /// Returns whether the value is within its expectation, if it has one.
    #[must_use]
    pub fn as_expected(&self) -> Option<bool> {
        let judged = self.ratio().unwrap_or(self.value);
        self.expected.map(|Expectation { least, most }| (least..=most).contains(&judged))
    }
}

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "snake_case")]
pub enum Verdict {
    /// All values are within their expectations.
    AsExpected,
    /// The check ran, and some values are outside.
    Surprising,
    /// A call was refused, bytes were wrong, or the check took too long.
    Failed(String),
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// The values, in the order of their measurement.
    pub values: Vec<Value>,
    /// Facts that are not numbers.
    pub notes: Vec<String>,
}

impl Findings {
    /// Returns the verdict on the values.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let surprising = self.values.iter().any(|value| value.as_expected() == Some(false));
        if surprising { Verdict::Surprising } else { Verdict::AsExpected }
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Records a value without an expectation.
    pub(super) fn value(&mut self, name: impl Into<String>, value: f64, unit: &str) {
        self.push(name.into(), value, unit, None, None);
    }

    /// Records a value with an expectation.
    pub(super) fn expect(
        &mut self,
        name: impl Into<String>,
        value: f64,
        unit: &str,
        expected: RangeInclusive<f64>,
    ) {
        self.push(name.into(), value, unit, None, Some(expected));
    }

    /// Records a value and the part of a ceiling that is expected.
    pub(super) fn of_ceiling(
        &mut self,
        name: impl Into<String>,
        value: f64,
        unit: &str,
        ceiling: f64,
        expected: Option<RangeInclusive<f64>>,
    ) {
        self.push(name.into(), value, unit, Some(ceiling), expected);
    }

    fn push(
        &mut self,
        name: String,
        value: f64,
        unit: &str,
        ceiling: Option<f64>,
        expected: Option<RangeInclusive<f64>>,
    ) {
        let expected = expected.map(|range| Expectation { least: *range.start(), most: *range.end() });
        self.values.push(Value { name, value, unit: unit.to_owned(), ceiling, expected });
    }
}

/// Returns the median.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns a duration in microseconds.
pub(super) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Returns a duration in milliseconds.
pub(super) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns a rate in GB/s.
pub(super) fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}
