//! How many chunks go over which route (D22). Only tests call this yet: `sim` moves no chunks.

use millrace_types::BytesPerSec;

/// Divides chunks in proportion to rates: each share is within one chunk of the exact one, and together
/// they are all there are. The largest remainders get what is left over, the first of equal ones. `None`
/// if no rate is above zero and there are chunks.
///
/// Whoever divides batch after batch divides what is left of the object each time, so that the remainders
/// of small batches do not add up.
#[must_use]
pub fn split(chunks: u64, rates: &[BytesPerSec]) -> Option<Vec<u64>> {
    let sum: u128 = rates.iter().map(|rate| u128::from(rate.0)).sum();
    if sum == 0 {
        return (chunks == 0).then(|| vec![0; rates.len()]);
    }
    let exact = |rate: &BytesPerSec| u128::from(chunks) * u128::from(rate.0);
    let whole = |rate| u64::try_from(exact(rate) / sum).unwrap_or(u64::MAX);
    let mut shares: Vec<u64> = rates.iter().map(whole).collect();
    let mut order: Vec<usize> = (0..rates.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(exact(&rates[at]) % sum));
    let over = chunks - shares.iter().sum::<u64>();
    order.iter().zip(0..over).for_each(|(&at, _)| shares[at] += 1);
    Some(shares)
}
