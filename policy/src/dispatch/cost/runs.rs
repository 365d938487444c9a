//! What runs take by how many rows they have: an estimate for each number of rows that ran, and a
//! straight line through them for those that did not (L15's regression over the batch size).

use std::time::Duration;

use super::estimate::Estimate;
use super::nanos;

/// Runs of one model on one kind of GPU. Sizes are those of batches: 64 at most.
#[derive(Debug, Default, Clone)]
pub(super) struct Runs(Vec<(u32, Estimate)>);

impl Runs {
    /// What a profile says of single rows.
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

    /// What a run of so many rows takes. Beyond all that ran it is unknown while only one size did.
    pub(super) fn get(&self, rows: u32) -> Option<Duration> {
        let exact = self.0.iter().find(|&&(size, _)| size == rows).and_then(|(_, estimate)| estimate.get());
        let nearest = || match self.0[..] {
            [] => None,
            // At most as long as a larger one.
            [(size, ref only)] => only.get().filter(|_| rows < size),
            _ => self.line(None).map(|line| line.at(rows)),
        };
        exact.or_else(nearest).map(Duration::from_nanos)
    }

    pub(super) fn briefest(&self) -> Option<Duration> {
        self.0.iter().filter_map(|(_, estimate)| estimate.get()).min().map(Duration::from_nanos)
    }

    /// The line through all sizes but one.
    fn line(&self, without: Option<u32>) -> Option<Line> {
        let points = self.0.iter().filter(|&&(size, _)| Some(size) != without);
        let points: Vec<_> = points.filter_map(|(size, estimate)| Some((*size, estimate.get()?))).collect();
        Line::through(&points)
    }

    /// How wrong the line is about sizes that it was drawn without, in percent of what they took, with
    /// how many it was asked about. None below three sizes.
    pub(super) fn held_out(&self) -> Option<(f64, usize)> {
        if self.0.len() < 3 {
            return None;
        }
        let error = |(size, estimate): &(u32, Estimate)| {
            let (came, told) = (estimate.get()?, self.line(Some(*size))?.at(*size));
            Some(told.abs_diff(came) as f64 / came.max(1) as f64 * 100.0)
        };
        let errors: Vec<f64> = self.0.iter().filter_map(error).collect();
        Some((errors.iter().sum::<f64>() / errors.len() as f64, errors.len()))
    }
}

/// Least squares.
struct Line {
    base: f64,
    by_row: f64,
}

impl Line {
    fn through(points: &[(u32, u64)]) -> Option<Self> {
        let count = points.len() as f64;
        let mean = |of: fn(&(u32, u64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|&(rows, _)| f64::from(rows)), mean(|&(_, took)| took as f64));
        let spread: f64 = points.iter().map(|&(rows, _)| (f64::from(rows) - x).powi(2)).sum();
        let both: f64 = points.iter().map(|&(rows, took)| (f64::from(rows) - x) * (took as f64 - y)).sum();
        let by_row = if spread > 0.0 { both / spread } else { 0.0 };
        (count > 0.0).then_some(Self { base: y - by_row * x, by_row })
    }

    /// Never less than nothing.
    fn at(&self, rows: u32) -> u64 {
        (self.base + self.by_row * f64::from(rows)).max(0.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn runs(of: &[(u32, u64)]) -> Runs {
        let mut runs = Runs::default();
        of.iter().for_each(|&(rows, ms)| runs.add(rows, MS(ms)));
        runs
    }

    #[test]
    fn sizes_that_ran_are_known_and_others_lie_on_the_line() {
        let runs = runs(&[(1, 12), (4, 18), (8, 26)]);
        assert_eq!((runs.get(4), runs.get(2), runs.get(16)), (Some(MS(18)), Some(MS(14)), Some(MS(42))));
        assert_eq!(runs.held_out(), Some((0.0, 3)));
    }

    #[test]
    fn a_single_size_says_nothing_of_larger_ones() {
        let runs = runs(&[(4, 18)]);
        assert_eq!((runs.get(1), runs.get(4), runs.get(5)), (Some(MS(18)), Some(MS(18)), None));
        assert_eq!((runs.held_out(), Runs::default().get(1)), (None, None));
    }

    #[test]
    fn the_error_is_of_sizes_that_were_left_out() {
        let (error, sizes) = runs(&[(1, 10), (2, 20), (4, 20)]).held_out().unwrap();
        // Without 1: 20; without 2: 13.3; without 4: 40.
        assert_eq!(sizes, 3);
        assert!((error - (100.0 + 33.3 + 100.0) / 3.0).abs() < 0.1, "{error}");
    }
}
