//! Profiles of models (F04, F05): which trials a profile needs, and the pace of the requests of a trial.
//!
//! A trial runs on a GPU that serves other requests too. It sends one request after another, and none for a while
//! once a request has met another request on the GPU: the trial then takes at most a tenth of the time. Only
//! requests that were alone count.
//!
//! The paper's trials have a request equal to their limit. Ours request no time, so that no slice waits for them:
//! a request that is alone gets the same tokens either way.

use std::time::Duration;

use millrace_types::profile::{PROFILE_QUOTAS, ProfilePoint, TrialSetting};
use millrace_types::slices::UNITS;
use millrace_types::{ComputeCurve, Permille, Timestamp};

/// The error of a measured width, as its neighbours predict it, from which on a further width is measured. For every
/// [`ComputeCurve`](millrace_types::ComputeCurve) the widths between the measured ones are then within a tenth.
pub const CURVE_ERROR_MAX: f64 = 0.05;
/// The widths in the order of their trials: the ends and the middle tell most of a curve.
const WIDTH_ORDER: [u8; 5] = [16, 1, 4, 2, 8];
/// The number of widths that every profile measures.
const WIDTHS_MIN: usize = 3;

/// Requests at the beginning of a trial that do not count.
const WARM_UP: u32 = 3;
/// Requests after which a trial ends.
const RUNS_MAX: usize = 200;
/// Requests that a trial needs.
const RUNS_MIN: usize = 5;
/// Measured time after which a trial ends.
const MEASURED_MAX: Duration = Duration::from_secs(5);
/// Least measured time of a trial that may compute for a part of the time only.
const QUOTA_MEASURED_MIN: Duration = Duration::from_secs(2);
/// Time after which the account of a limited trial is used up, so that the limit shows.
const QUOTA_WARM_UP: Duration = Duration::from_secs(1);
/// Time after which a trial without enough requests is given up.
const TRIAL_MAX: Duration = Duration::from_secs(60);
/// Least pause after a request that was not alone.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Length of the pause, in durations of the request before.
const PAUSE_RUNS: u32 = 9;

/// The trials that a profile has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfileCoverage {
    /// As many widths as the curve needs, at all of the time.
    Curve,
    /// Every width with every quota, as in the paper.
    Grid,
}

/// Returns the next trial of a profile; `None` once the profile is complete.
#[must_use]
pub fn next_trial(points: &[ProfilePoint], coverage: ProfileCoverage) -> Option<TrialSetting> {
    let missing = |setting: &TrialSetting| points.iter().all(|point| point.setting != *setting);
    match coverage {
        ProfileCoverage::Grid => {
            let of_width = |units| {
                let quotas = PROFILE_QUOTAS.iter().rev().filter_map(|&quota| Permille::new(quota));
                quotas.filter_map(move |quota| TrialSetting::new(units, quota))
            };
            WIDTH_ORDER.into_iter().flat_map(of_width).find(missing)
        }
        ProfileCoverage::Curve => {
            let mut widths = WIDTH_ORDER.into_iter().filter_map(TrialSetting::whole_time);
            let first = widths.by_ref().take(WIDTHS_MIN).find(missing);
            if first.is_some() {
                return first;
            }
            let curve = MeasuredCurve::new(points);
            let steepness = |setting: &TrialSetting| curve.ratio_around(setting.units());
            let rest = widths.filter(missing);
            let steepest = rest.max_by(|a, b| steepness(a).total_cmp(&steepness(b)));
            steepest.filter(|_| curve.error() > CURVE_ERROR_MAX)
        }
    }
}

/// The number of saturations between nothing and the whole GPU that [`MeasuredCurve::fitted`] tries: with quarters
/// of a unit, a fitted curve is within 6% of the curve that was measured.
const SATURATION_STEPS: u16 = 64;

/// Times of a model by the number of SM units, through the measured widths.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredCurve {
    /// Widths and times in seconds, the narrowest first. No width is slower than a narrower one.
    knots: Vec<(f64, f64)>,
}

impl MeasuredCurve {
    /// Returns the curve of the points that were measured at all of the time.
    #[must_use]
    pub fn new(points: &[ProfilePoint]) -> Self {
        let whole = points.iter().filter(|point| point.setting.quota() == Permille::ALL);
        let mut knots: Vec<_> = whole
            .map(|point| (f64::from(point.setting.units()), point.p50.as_secs_f64().max(1e-9)))
            .collect();
        knots.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut least = f64::INFINITY;
        for (_, time) in &mut knots {
            least = least.min(*time);
            *time = least;
        }
        Self { knots }
    }

    /// Returns the median time of a request on so many units; `None` beyond the measured widths.
    #[must_use]
    pub fn time_on(&self, units: u8) -> Option<Duration> {
        interpolated(&self.knots, f64::from(units)).map(Duration::from_secs_f64)
    }

    /// Returns the largest relative error with which a measured width follows from its neighbours; 0 with less
    /// than three widths.
    #[must_use]
    pub fn error(&self) -> f64 {
        let of_triple = |triple: &[(f64, f64)]| {
            let (units, time) = triple[1];
            let predicted = interpolated(&[triple[0], triple[2]], units).unwrap_or(time);
            (predicted - time).abs() / time
        };
        self.knots.windows(3).map(of_triple).fold(0.0, f64::max)
    }

    /// Returns the nearest curve to the measured times, by least squares of the logarithms. `None` before the
    /// least number of widths and the whole GPU are measured, because several curves fit then.
    #[must_use]
    pub fn fitted(&self) -> Option<ComputeCurve> {
        let &(widest, fastest) = self.knots.last()?;
        if self.knots.len() < WIDTHS_MIN || widest < f64::from(UNITS) {
            return None;
        }
        let of_saturation = |step: u16| {
            let saturation = Permille::new(step * 1000 / SATURATION_STEPS)?;
            // The share of a width, rounded down as the token core does.
            let share = |units: f64| (units * 1000.0 / f64::from(UNITS)).floor();
            let narrower = |units: f64| (f64::from(saturation.get()) / share(units)).ln().max(0.0);
            let slower = |time: f64| (time / fastest).ln();
            let products: f64 = self.knots.iter().map(|&(units, time)| narrower(units) * slower(time)).sum();
            let squares: f64 = self.knots.iter().map(|&(units, _)| narrower(units).powi(2)).sum();
            let exponent = if squares == 0.0 { 0.0 } else { (products / squares).clamp(0.0, 1.0) };
            let miss = |&(units, time): &(f64, f64)| (exponent * narrower(units) - slower(time)).powi(2);
            Some((self.knots.iter().map(miss).sum::<f64>(), ComputeCurve::new(saturation, exponent).ok()?))
        };
        let curves = (1..=SATURATION_STEPS).filter_map(of_saturation);
        curves.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, curve)| curve)
    }

    /// Returns how many times slower the next measured width below is than the next above.
    fn ratio_around(&self, units: u8) -> f64 {
        let units = f64::from(units);
        let below = self.knots.iter().rev().find(|knot| knot.0 < units);
        let above = self.knots.iter().find(|knot| knot.0 > units);
        below.zip(above).map_or(1.0, |(below, above)| below.1 / above.1)
    }
}

/// Returns the value at `x` on the lines between the knots, on logarithmic axes.
fn interpolated(knots: &[(f64, f64)], x: f64) -> Option<f64> {
    let above = knots.iter().position(|knot| knot.0 >= x)?;
    let (x1, y1) = knots[above];
    if x1 == x {
        return Some(y1);
    }
    let (x0, y0) = *knots.get(above.checked_sub(1)?)?;
    let part = (x / x0).ln() / (x1 / x0).ln();
    Some((y0.ln() + part * (y1 / y0).ln()).exp())
}

/// The answer to a request of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrialAnswer {
    /// The time from sending the request to its answer.
    pub took: Duration,
    /// The time that the request computed.
    pub computed: Duration,
    /// The time between its launches in which the request waited for tokens.
    pub held: Duration,
    /// The SM units on which the request computed; `None` if the GPU is not shared.
    pub units: Option<u8>,
    /// Whether no other request computed on the GPU meanwhile.
    pub alone: bool,
}

/// The next step of a trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrialStep {
    /// Send a request after this pause.
    Send { after: Duration },
    /// The trial is complete.
    Done(ProfilePoint),
    /// The trial cannot be completed now.
    GiveUp(TrialFault),
}

/// The reason why a trial was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TrialFault {
    /// The GPU is not shared.
    #[error("the GPU is not shared: 'millrace policy set --gpu-sharing slices' shares emulated GPUs")]
    NotShared,
    /// Other requests computed on the GPU most of the time.
    #[error(
        "{alone} of {all} requests of the trial were alone on the GPU, and {RUNS_MIN} are needed: profile when fewer requests come"
    )]
    Busy {
        /// Requests that were alone.
        alone: u32,
        /// All requests.
        all: u32,
    },
}

/// A trial: decides when requests are sent, and measures their answers.
#[derive(Debug)]
pub struct Trial {
    setting: TrialSetting,
    began: Timestamp,
    /// The time from which answers count.
    counts_from: Timestamp,
    /// Answers so far.
    answers: u32,
    latencies: Vec<Duration>,
    elapsed: Duration,
    computed: Duration,
}

impl Trial {
    /// Returns a trial that begins now.
    #[must_use]
    pub fn new(now: Timestamp, setting: TrialSetting) -> Self {
        let mut trial = Self {
            setting,
            began: now,
            counts_from: now,
            answers: 0,
            latencies: Vec::new(),
            elapsed: Duration::ZERO,
            computed: Duration::ZERO,
        };
        trial.warm_up(now);
        trial
    }

    /// Handles the answer to a request.
    #[must_use]
    pub fn on_answer(&mut self, now: Timestamp, answer: TrialAnswer) -> TrialStep {
        if answer.units.is_none() {
            return TrialStep::GiveUp(TrialFault::NotShared);
        }
        self.answers = self.answers.saturating_add(1);
        // New terms reach a seat with its next token.
        let counts = answer.alone && answer.units == Some(self.setting.units());
        let sent = Timestamp(
            now.as_nanos().saturating_sub(u64::try_from(answer.took.as_nanos()).unwrap_or(u64::MAX)),
        );
        if counts && self.answers > WARM_UP && sent >= self.counts_from {
            self.latencies.push(answer.computed + answer.held);
            self.elapsed += answer.took;
            self.computed += answer.computed;
        }
        if self.is_complete() {
            return TrialStep::Done(self.point());
        }
        if now.since(self.began) >= TRIAL_MAX {
            let alone = self.latencies.len();
            if alone >= RUNS_MIN {
                return TrialStep::Done(self.point());
            }
            let alone = u32::try_from(alone).unwrap_or(u32::MAX);
            return TrialStep::GiveUp(TrialFault::Busy { alone, all: self.answers });
        }
        if answer.alone {
            return TrialStep::Send { after: Duration::ZERO };
        }
        let after = (answer.took * PAUSE_RUNS).max(PAUSE_MIN);
        self.warm_up(now + after);
        TrialStep::Send { after }
    }

    /// Lets answers count once the limit of the trial shows.
    fn warm_up(&mut self, from: Timestamp) {
        let limited = self.setting.quota() < Permille::ALL;
        self.counts_from = if limited { from + QUOTA_WARM_UP } else { from };
    }

    fn is_complete(&self) -> bool {
        let runs = self.latencies.len();
        let limited = self.setting.quota() < Permille::ALL;
        let least = if limited { QUOTA_MEASURED_MIN } else { Duration::ZERO };
        runs >= RUNS_MAX && self.elapsed >= least || runs >= RUNS_MIN && self.elapsed >= MEASURED_MAX
    }

    fn point(&self) -> ProfilePoint {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let at = |share: f64| {
            let place = (sorted.len() as f64 * share).ceil() as usize;
            sorted.get(place.max(1) - 1).copied().unwrap_or_default()
        };
        ProfilePoint {
            runs: u32::try_from(sorted.len()).unwrap_or(u32::MAX),
            p50: at(0.5),
            p99: at(0.99),
            elapsed: self.elapsed,
            computed: self.computed,
            ..ProfilePoint::new(self.setting)
        }
    }
}

#[cfg(test)]
mod tests;
