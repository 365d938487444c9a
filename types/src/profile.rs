//! The measured speed of a model on parts of a GPU: the profile of FaST-GShare (F04, F05).
//!
//! A profile has points. Each [`ProfilePoint`] is the result of a trial: requests one after another, on a
//! number of SM units, for at most a share of the time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::slices::{Permille, UNITS};

/// Maximum number of points of a profile: [`PROFILE_WIDTHS`] × [`PROFILE_QUOTAS`].
pub const PROFILE_POINTS_MAX: usize = PROFILE_WIDTHS.len() * PROFILE_QUOTAS.len();
/// The numbers of SM units that trials measure. The paper measures 6, 12, 24, 50, 60, 80 and 100% of the SMs;
/// in blocks of units the last three are the whole GPU.
pub const PROFILE_WIDTHS: [u8; 5] = [1, 2, 4, 8, UNITS];
/// The shares of the time that trials measure, in thousandths (F05).
pub const PROFILE_QUOTAS: [u16; 5] = [200, 400, 600, 800, 1000];

/// The speed of a model on a type of GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProfile {
    /// The type of GPU that the points were measured on.
    pub gpu_type: String,
    /// The id of the operation that measured the points. Points of an earlier operation are dropped.
    pub operation: u64,
    /// The points, each pair of width and quota once, in the order of their trials.
    pub points: Vec<ProfilePoint>,
}

/// The result of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "PointNumbers", into = "PointNumbers")]
pub struct ProfilePoint {
    /// The part of the GPU on which the trial ran.
    pub setting: TrialSetting,
    /// The number of requests, without those that were not alone on the GPU.
    pub runs: u32,
    /// The median time of a request from its first launch to its end, waits for tokens included.
    pub p50: Duration,
    /// The 99th percentile of the same.
    pub p99: Duration,
    /// The time that the requests took together, from the client's view.
    pub elapsed: Duration,
    /// The time that the requests computed together.
    pub computed: Duration,
}

/// The part of a GPU on which a trial runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrialSetting {
    units: u8,
    quota: Permille,
}

impl TrialSetting {
    /// Returns the trial on `units` SM units for at most `quota` of the time; `None` unless the width is one of
    /// [`PROFILE_WIDTHS`] and the quota one of [`PROFILE_QUOTAS`].
    #[must_use]
    pub fn new(units: u8, quota: Permille) -> Option<Self> {
        let known = PROFILE_WIDTHS.contains(&units) && PROFILE_QUOTAS.contains(&quota.get());
        known.then_some(Self { units, quota })
    }

    /// Returns the trial on `units` SM units for all of the time; `None` unless the width is one of
    /// [`PROFILE_WIDTHS`].
    #[must_use]
    pub fn whole_time(units: u8) -> Option<Self> {
        Self::new(units, Permille::ALL)
    }

    /// Returns the number of SM units, of [`UNITS`].
    #[must_use]
    pub const fn units(self) -> u8 {
        self.units
    }

    /// Returns the greatest share of the time.
    #[must_use]
    pub const fn quota(self) -> Permille {
        self.quota
    }
}

impl ProfilePoint {
    /// Returns a point without runs.
    #[must_use]
    pub const fn new(setting: TrialSetting) -> Self {
        let zero = Duration::ZERO;
        Self { setting, runs: 0, p50: zero, p99: zero, elapsed: zero, computed: zero }
    }

    /// Returns the number of requests in a second: `T` of FaST-GShare.
    #[must_use]
    pub fn throughput(&self) -> f64 {
        if self.elapsed.is_zero() { 0.0 } else { f64::from(self.runs) / self.elapsed.as_secs_f64() }
    }

    /// Returns the share of the time in which the requests computed.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        if self.elapsed.is_zero() { 0.0 } else { self.computed.as_secs_f64() / self.elapsed.as_secs_f64() }
    }

    /// Returns the mean share of the GPU's SMs that were taken: the utilisation times the width.
    #[must_use]
    pub fn occupancy(&self) -> f64 {
        self.utilisation() * f64::from(self.setting.units) / f64::from(UNITS)
    }

    /// Returns the throughput for each share of the GPU, `RPR = T / (S × Q)` of FaST-GShare.
    #[must_use]
    pub fn throughput_per_share(&self) -> f64 {
        let sms = f64::from(self.setting.units) / f64::from(UNITS);
        self.throughput() / (sms * f64::from(self.setting.quota.get()) / 1000.0)
    }
}

/// A [`ProfilePoint`] as stored, not yet checked. Times are in nanoseconds.
#[derive(Serialize, Deserialize)]
#[serde(rename = "ProfilePoint")]
struct PointNumbers {
    units: u8,
    quota: Permille,
    runs: u32,
    p50_ns: u64,
    p99_ns: u64,
    elapsed_ns: u64,
    computed_ns: u64,
}

impl TryFrom<PointNumbers> for ProfilePoint {
    type Error = String;

    fn try_from(numbers: PointNumbers) -> Result<Self, String> {
        let PointNumbers { units, quota, .. } = numbers;
        let setting = TrialSetting::new(units, quota)
            .ok_or_else(|| format!("no trial runs on {units} units for {quota} of the time"))?;
        Ok(Self {
            setting,
            runs: numbers.runs,
            p50: Duration::from_nanos(numbers.p50_ns),
            p99: Duration::from_nanos(numbers.p99_ns),
            elapsed: Duration::from_nanos(numbers.elapsed_ns),
            computed: Duration::from_nanos(numbers.computed_ns),
        })
    }
}

impl From<ProfilePoint> for PointNumbers {
    fn from(point: ProfilePoint) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            units: point.setting.units,
            quota: point.setting.quota,
            runs: point.runs,
            p50_ns: nanos(point.p50),
            p99_ns: nanos(point.p99),
            elapsed_ns: nanos(point.elapsed),
            computed_ns: nanos(point.computed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_run_on_the_widths_and_quotas_of_the_grid_alone() {
        let quota = |thousandths| Permille::new(thousandths).unwrap();
        assert_eq!(TrialSetting::new(4, quota(600)).map(TrialSetting::units), Some(4));
        assert_eq!(TrialSetting::new(3, quota(600)), None);
        assert_eq!(TrialSetting::new(4, quota(500)), None);
        assert_eq!(TrialSetting::whole_time(16), TrialSetting::new(16, Permille::ALL));
        assert_eq!(PROFILE_POINTS_MAX, 25);
    }

    #[test]
    fn a_point_states_throughput_utilisation_and_occupancy() {
        let setting = TrialSetting::new(4, Permille::new(400).unwrap()).unwrap();
        let seconds = Duration::from_secs;
        let point = ProfilePoint {
            runs: 100,
            elapsed: seconds(10),
            computed: seconds(4),
            ..ProfilePoint::new(setting)
        };
        assert_eq!(point.throughput(), 10.0);
        assert_eq!(point.utilisation(), 0.4);
        assert_eq!(point.occupancy(), 0.1);
        assert_eq!(point.throughput_per_share(), 100.0);
        assert_eq!(ProfilePoint::new(setting).throughput(), 0.0);
    }
}
