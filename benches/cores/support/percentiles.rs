//! Percentiles of measurements.

/// Returns these percentiles of the samples.
pub(crate) fn percentiles<T: Copy + Ord, const N: usize>(
    mut samples: Vec<T>,
    percents: [usize; N],
) -> [T; N] {
    samples.sort_unstable();
    percents.map(|percent| samples[(samples.len() - 1) * percent / 100])
}
