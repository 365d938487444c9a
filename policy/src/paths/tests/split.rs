//! Shares of chunks (D22).

use proptest::prelude::*;

use super::*;

#[test]
fn divides_chunks_by_the_rates() {
    let check = |chunks, rates: &[u64], expected: Option<&[u64]>| {
        let rates: Vec<_> = rates.iter().copied().map(gb).collect();
        assert_eq!(super::super::split(chunks, &rates).as_deref(), expected);
    };
    check(9, &[48, 24], Some(&[6, 3]));
    check(5, &[48, 24], Some(&[3, 2]));
    check(1, &[24, 24], Some(&[1, 0]));
    check(4, &[0, 24], Some(&[0, 4]));
    check(0, &[0, 0], Some(&[0, 0]));
    check(1, &[0, 0], None);
    check(1, &[], None);
}

proptest! {
    #[test]
    fn shares_are_within_one_chunk_and_lose_none(
        chunks in 0..u64::from(u32::MAX),
        rates in prop::collection::vec(0..u64::MAX / 16, 1..9),
    ) {
        let sum: u128 = rates.iter().map(|&rate| u128::from(rate)).sum();
        prop_assume!(sum > 0);
        let given: Vec<_> = rates.iter().copied().map(BytesPerSec).collect();
        let shares = super::super::split(chunks, &given).unwrap();
        prop_assert_eq!(shares.iter().sum::<u64>(), chunks);
        for (share, rate) in shares.iter().zip(rates) {
            let exact = u128::from(chunks) * u128::from(rate);
            prop_assert!((u128::from(*share) * sum).abs_diff(exact) < sum, "{} of {}", share, chunks);
        }
    }
}
