//! The size of a group: how much of a model's weights travels, and is waited for, together (T09). It is
//! the elbow of the curve that each GPU's first executor measures before it is ready
//! ([`millrace_model::elbow`]), within [`GROUP_MIN`] and [`GROUP_MAX`]: the host tier cuts models by it,
//! and executors copy in pieces of it. Where nothing was measured, it is [`GROUP_BYTES`].
//!
//! The curve is of copies alone, one after another: what else a group costs (a wake, a launch) is not
//! in it. That is what the lower bound is for.

use millrace_model::elbow::{Throughput, elbow};
use millrace_model::{GROUP_BYTES, Grouping};
use millrace_proto::executor::CopyRate;
use millrace_types::Bytes;

/// The smallest group: below, launches get more and copies no faster (`executor/benches/swap.rs`).
pub const GROUP_MIN: Bytes = Bytes(128 << 10);
/// The largest: a block of GPU memory, and the most that one copy moves.
pub const GROUP_MAX: Bytes = Bytes::mib(2);

/// The size of a group by what was measured, if anything was.
pub(crate) fn measured(rates: &[CopyRate]) -> Option<Bytes> {
    let point = |rate: &CopyRate| Throughput { bytes: rate.bytes, bytes_per_s: rate.bytes_per_s };
    let elbow = elbow(&rates.iter().map(point).collect::<Vec<_>>())?;
    Some(Bytes(elbow).clamp(GROUP_MIN, GROUP_MAX))
}

/// How a model is cut.
pub(crate) fn grouping(measured: Option<Bytes>) -> Grouping {
    Grouping { bytes: measured.map_or(GROUP_BYTES, Bytes::get), ..Grouping::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(u64, u64)]) -> Vec<CopyRate> {
        points.iter().map(|&(bytes, bytes_per_s)| CopyRate { bytes, bytes_per_s }).collect()
    }

    #[test]
    fn a_group_is_the_elbow_within_bounds() {
        let (kib, mib) = (1 << 10, 1 << 20);
        assert_eq!(
            measured(&curve(&[(128 * kib, 50), (512 * kib, 95), (2 * mib, 100)])),
            Some(Bytes(512 * kib))
        );
        assert_eq!(measured(&curve(&[(4 * kib, 95), (2 * mib, 100)])), Some(GROUP_MIN));
        assert_eq!(measured(&curve(&[(2 * mib, 50), (32 * mib, 100)])), Some(GROUP_MAX));
        assert_eq!(measured(&[]), None);
    }

    #[test]
    fn what_was_not_measured_is_cut_as_the_papers_hardware_wants() {
        assert_eq!(grouping(None), Grouping::default());
        assert_eq!(grouping(Some(GROUP_MIN)).bytes, GROUP_MIN.get());
    }
}
