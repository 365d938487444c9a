//! Run times by number of rows: an estimate for each number of rows that ran, and a regression line
//! through these for all other numbers (L15's regression over the batch size).

use std::time::Duration;

use super::estimate::{Estimate, nanos};

/// Run times of a model on a kind of GPU. Batches have at most 64 rows, hence at most 64
/// entries.
#[derive(Debug, Default, Clone)]
pub(super) struct RunTimeModel(Vec<(u32, Estimate)>);

impl RunTimeModel {
    /// Creates run times from a profile of single rows.
    pub(super) fn profiled(run: Duration) -> Self {
        Self(vec![(1, Estimate::profiled(nanos(run)))])
    }

    pub(super) fn add(&mut self, rows: u32, ran: Duration) {
        let place = self.0.binary_search_by_key(&rows, |&(rows, _)| rows).unwrap_or_else(|place| {
            self.0.insert(place, (rows, Estimate::default()));
            place
        });
        self.0[place].1.add(nanos(ran));
    }

    /// Returns the run time of `rows` rows. Unknown beyond the only size while a single size ran.
    pub(super) fn get(&self, rows: u32) -> Option<Duration> {
        let exact = self.0.iter().find(|&&(size, _)| size == rows).and_then(|(_, estimate)| estimate.get());
        let nearest = || match self.0[..] {
            [] => None,
            // At most the time of the larger size.
            [(size, ref only)] => only.get().filter(|_| rows < size),
            _ => self.line(None).map(|line| line.at(rows)),
        };
        exact.or_else(nearest).map(Duration::from_nanos)
    }

    pub(super) fn briefest(&self) -> Option<Duration> {
        self.0.iter().filter_map(|(_, estimate)| estimate.get()).min().map(Duration::from_nanos)
    }

    /// Returns the line through all sizes except `without`.
    fn line(&self, without: Option<u32>) -> Option<RegressionLine> {
        let points = self.0.iter().filter(|&&(size, _)| Some(size) != without);
        let points: Vec<_> = points.filter_map(|(size, estimate)| Some((*size, estimate.get()?))).collect();
        RegressionLine::through(&points)
    }

    /// Returns the mean error of lines fitted without the predicted size, in percent of the
    /// actual run time, with the number of sizes. `None` with fewer than three sizes.
    pub(super) fn held_out(&self) -> Option<(f64, usize)> {
        if self.0.len() < 3 {
            return None;
        }
        let error = |(size, estimate): &(u32, Estimate)| {
            let came = estimate.get()?;
            let told = self.line(Some(*size))?.at(*size);
            Some(told.abs_diff(came) as f64 / came.max(1) as f64 * 100.0)
        };
        let errors: Vec<f64> = self.0.iter().filter_map(error).collect();
        Some((errors.iter().sum::<f64>() / errors.len() as f64, errors.len()))
    }
}

/// Least-squares line of run time, in nanoseconds, over rows.
struct RegressionLine {
    base: f64,
    by_row: f64,
}

impl RegressionLine {
    fn through(points: &[(u32, u64)]) -> Option<Self> {
        let count = points.len() as f64;
        let mean = |of: fn(&(u32, u64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let x = mean(|&(rows, _)| f64::from(rows));
        let y = mean(|&(_, took)| took as f64);
        let spread: f64 = points.iter().map(|&(rows, _)| (f64::from(rows) - x).powi(2)).sum();
        let both: f64 = points.iter().map(|&(rows, took)| (f64::from(rows) - x) * (took as f64 - y)).sum();
        let by_row = if spread > 0.0 { both / spread } else { 0.0 };
        (count > 0.0).then_some(Self { base: y - by_row * x, by_row })
    }

    /// Returns the line's value, clamped to at least 0.
    fn at(&self, rows: u32) -> u64 {
        (self.base + self.by_row * f64::from(rows)).max(0.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn runs(of: &[(u32, u64)]) -> RunTimeModel {
        let mut runs = RunTimeModel::default();
        of.iter().for_each(|&(rows, ms)| runs.add(rows, MS(ms)));
        runs
    }

    #[test]
    fn unmeasured_sizes_lie_on_the_line_through_measured_ones() {
        let runs = runs(&[(1, 12), (4, 18), (8, 26)]);
        assert_eq!((runs.get(4), runs.get(2), runs.get(16)), (Some(MS(18)), Some(MS(14)), Some(MS(42))));
        assert_eq!(runs.held_out(), Some((0.0, 3)));
    }

    #[test]
    fn a_single_measured_size_predicts_no_larger_size() {
        let runs = runs(&[(4, 18)]);
        assert_eq!((runs.get(1), runs.get(4), runs.get(5)), (Some(MS(18)), Some(MS(18)), None));
        assert_eq!((runs.held_out(), RunTimeModel::default().get(1)), (None, None));
    }

    #[test]
    fn held_out_error_predicts_each_size_from_the_others() {
        let (error, sizes) = runs(&[(1, 10), (2, 20), (4, 20)]).held_out().unwrap();
        // Without 1: 20; without 2: 13.3; without 4: 40.
        assert_eq!(sizes, 3);
        assert!((error - (100.0 + 33.3 + 100.0) / 3.0).abs() < 0.1, "{error}");
    }
}
