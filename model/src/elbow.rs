//! Picks the size of a group from measured transfers (T09). Pure code: the caller measures the
//! transfers on the hardware.
//!
//! The rule: the smallest size at which transfers reach [`PLATEAU_PERCENT`] of the best throughput of
//! the curve. Torpor names the elbow (§4.3) and its position, about 2 MB, but no rule. This rule
//! depends only on the curve, not on a model or on other properties of the hardware.
//!
//! If a transfer costs a fixed time `t` and then moves bytes at a rate `r`, the elbow is at `9·t·r`.
//! PCIe at 12 GB/s and 10 to 37 µs give 1 to 4 MB.

/// A point of a throughput curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Throughput {
    /// Size of a transfer in bytes.
    pub bytes: u64,
    /// Throughput of consecutive transfers of this size, in bytes per second.
    pub bytes_per_s: u64,
}

/// Share of the best throughput that is enough, in percent. Beyond it, larger groups gain at most a
/// tenth of the throughput, and delay the first launch.
pub const PLATEAU_PERCENT: u64 = 90;

/// Returns the elbow of a curve in bytes, for points in any order. Returns `None` if no point has a
/// throughput above 0.
///
/// The plateau is the best point and not the last one, because transfers that exceed a cache get
/// slower again.
#[must_use]
pub fn elbow(curve: &[Throughput]) -> Option<u64> {
    let best = curve.iter().map(|point| point.bytes_per_s).max().filter(|&best| best > 0)?;
    let enough = u128::from(best) * u128::from(PLATEAU_PERCENT);
    let reaches = |point: &&Throughput| u128::from(point.bytes_per_s) * 100 >= enough;
    curve.iter().filter(reaches).map(|point| point.bytes).min()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZES: std::ops::RangeInclusive<u32> = 12..=25;

    /// Returns points at powers of two from 4 KiB to 32 MiB, for a link with a fixed cost per transfer.
    fn curve(cost_ns: u64, rate: u64) -> Vec<Throughput> {
        let point = |power: u32| {
            let bytes = 1u64 << power;
            let ns = cost_ns + bytes * 1_000_000_000 / rate;
            Throughput { bytes, bytes_per_s: bytes * 1_000_000_000 / ns.max(1) }
        };
        SIZES.map(point).collect()
    }

    /// The V100 of T09: PCIe 3.0 at 12 GB/s. The cost of a transfer is an assumption, because the
    /// paper gives none.
    #[test]
    fn the_elbow_of_a_v100_is_between_one_and_four_megabytes() {
        for cost_us in [10, 15, 20, 25] {
            let elbow = elbow(&curve(cost_us * 1000, 12_000_000_000)).unwrap();
            assert!((1 << 20..=4 << 20).contains(&elbow), "{cost_us} µs: {elbow}");
        }
    }

    #[test]
    fn a_curve_without_throughput_has_no_elbow() {
        assert_eq!(elbow(&[]), None);
        assert_eq!(elbow(&[Throughput { bytes: 1, bytes_per_s: 0 }]), None);
    }

    #[test]
    fn a_curve_that_falls_again_has_its_elbow_before_its_best() {
        let points = [(1, 10), (2, 80), (4, 92), (8, 100), (16, 70), (32, 60)];
        let points = points.map(|(bytes, bytes_per_s)| Throughput { bytes, bytes_per_s });
        assert_eq!(elbow(&points), Some(4));
    }

    proptest! {
        /// All smaller sizes are too slow, and no larger size is much faster.
        #[test]
        fn the_elbow_reaches_the_plateau_and_nothing_smaller_does(
            points in prop::collection::vec((1u64..1 << 30, 1u64..1 << 40), 1..20),
        ) {
            let points: Vec<_> =
                points.into_iter().map(|(bytes, bytes_per_s)| Throughput { bytes, bytes_per_s }).collect();
            let at = elbow(&points).unwrap();
            let best = points.iter().map(|point| point.bytes_per_s).max().unwrap();
            let enough = |point: &Throughput| point.bytes_per_s as f64 >= 0.9 * best as f64 * (1.0 - 1e-9);
            prop_assert!(points.iter().any(|point| point.bytes == at && enough(point)));
            prop_assert!(!points.iter().any(|point| point.bytes < at && point.bytes_per_s as f64 > 0.9 * best as f64 * (1.0 + 1e-9)));
        }

        #[test]
        fn the_elbow_depends_on_neither_the_order_nor_the_unit_of_the_points(
            cost_us in 1u64..100, gb in 1u64..64, rotate in 0usize..14, scale in 2u64..1000,
        ) {
            let points = curve(cost_us * 1000, gb * 1_000_000_000);
            let expected = elbow(&points);
            let mut turned = points.clone();
            turned.rotate_left(rotate);
            prop_assert_eq!(elbow(&turned), expected);
            let scaled: Vec<_> = points
                .iter()
                .map(|point| Throughput { bytes_per_s: point.bytes_per_s * scale, ..*point })
                .collect();
            prop_assert_eq!(elbow(&scaled), expected);
        }

        #[test]
        fn a_higher_transfer_cost_never_makes_groups_smaller(cost_us in 1u64..50, more in 0u64..50, gb in 1u64..64) {
            let at = |cost_us: u64| elbow(&curve(cost_us * 1000, gb * 1_000_000_000)).unwrap();
            prop_assert!(at(cost_us + more) >= at(cost_us));
        }

        /// A measurement error of up to 2.5% at each point moves the elbow by at most one size: if a
        /// size just reaches 90% of the best throughput, the next size has 5% to spare.
        #[test]
        fn noise_moves_the_elbow_by_one_size_at_most(
            cost_us in 1u64..50, gb in 1u64..32, noise in prop::collection::vec(975u64..=1025, 14),
        ) {
            let points = curve(cost_us * 1000, gb * 1_000_000_000);
            let noisy: Vec<_> = points
                .iter()
                .zip(noise)
                .map(|(point, noise)| Throughput { bytes_per_s: point.bytes_per_s / 1000 * noise, ..*point })
                .collect();
            let clean = elbow(&points).unwrap();
            let noisy = elbow(&noisy).unwrap();
            prop_assert!(noisy <= clean * 2 && clean <= noisy * 2, "{} and {}", clean, noisy);
        }
    }
}
