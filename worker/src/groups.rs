//! The size of a weight group: the weights that are copied to a GPU, and awaited, together (T09).
//! The size is the elbow of the curve that each GPU's first executor measures before reporting
//! ready ([`millrace_model::elbow`]), within [`GROUP_MIN`] and [`GROUP_MAX`]. The host tier cuts
//! models into groups of this size, and executors copy in pieces of it. Without a measurement the
//! size is [`GROUP_BYTES`].
//!
//! The curve covers only copies, one after another. It leaves out the other costs of a group, such
//! as a wake and a launch; the lower bound accounts for such costs.

use std::num::NonZeroUsize;

use millrace_model::elbow::{Throughput, elbow};
use millrace_model::{GROUP_BYTES, Grouping};
use millrace_proto::executor::CopyRate;
use millrace_types::Bytes;

/// Smallest group, in bytes. Smaller groups add launches and copy no faster
/// (`executor/benches/swap.rs`).
pub const GROUP_MIN: Bytes = Bytes(128 << 10);
/// Largest group, in bytes: a chunk of transfers. A copy of every device moves at least as much.
pub const GROUP_MAX: Bytes = Bytes::mib(2);

/// Returns the group size that copy rates imply; `None` without a measurement.
pub(crate) fn measured(rates: &[CopyRate]) -> Option<Bytes> {
    let point = |rate: &CopyRate| Throughput { bytes: rate.bytes, bytes_per_s: rate.bytes_per_s };
    let elbow = elbow(&rates.iter().map(point).collect::<Vec<_>>())?;
    Some(Bytes(elbow).clamp(GROUP_MIN, GROUP_MAX))
}

/// Returns the rule by which a model is cut into groups, with at most this many launches.
pub(crate) fn grouping(measured: Option<Bytes>, launches_max: NonZeroUsize) -> Grouping {
    Grouping { bytes: measured.map_or(GROUP_BYTES, Bytes::get), launches_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u64, u64)]) -> Vec<CopyRate> {
        points.iter().map(|&(bytes, bytes_per_s)| CopyRate { bytes, bytes_per_s }).collect()
    }

    #[test]
    fn a_group_is_the_elbow_within_bounds() {
        let kib = 1 << 10;
        let mib = 1 << 20;
        assert_eq!(
            measured(&curve(&[(128 * kib, 50), (512 * kib, 95), (2 * mib, 100)])),
            Some(Bytes(512 * kib))
        );
        assert_eq!(measured(&curve(&[(4 * kib, 95), (2 * mib, 100)])), Some(GROUP_MIN));
        assert_eq!(measured(&curve(&[(2 * mib, 50), (32 * mib, 100)])), Some(GROUP_MAX));
        assert_eq!(measured(&[]), None);
    }

    #[test]
    fn without_a_measurement_groups_have_the_papers_size() {
        let launches_max = Grouping::default().launches_max;
        assert_eq!(grouping(None, launches_max), Grouping::default());
        assert_eq!(grouping(Some(GROUP_MIN), launches_max).bytes, GROUP_MIN.get());
    }
}
