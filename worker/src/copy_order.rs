//! The order in which the weights of an opaque program are copied: as an executor recorded that they are
//! read (T06). Pure.
//!
//! The fabric grants a model's chunks from the first to the last and knows of no order. So for a program
//! with one, a chunk is a place in it, and which bytes are there is looked up here as the grant goes to
//! the executor. A mapping keeps the order that it began with: part of it may be there already when
//! another is recorded.

use std::ops::Range;

use millrace_proto::executor::ByteRange;
use millrace_types::Bytes;

/// All bytes of a program's weights, in the order in which to copy them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CopyOrder {
    /// Where each piece begins in the order, and which bytes it is.
    pieces: Vec<(u64, Range<u64>)>,
}

impl CopyOrder {
    /// The order that an executor told; `None` where it is not every byte of the weights once.
    pub(crate) fn new(told: &[ByteRange], weights: Bytes) -> Option<Self> {
        let mut place = 0_u64;
        let mut pieces = Vec::with_capacity(told.len());
        for &ByteRange { offset, bytes } in told {
            pieces.push((place, offset..offset.checked_add(bytes)?));
            place = place.checked_add(bytes)?;
        }
        let mut by_offset: Vec<_> = pieces.iter().map(|(_, bytes)| (bytes.start, bytes.end)).collect();
        by_offset.sort_unstable();
        let follows = |at: u64, &(start, end): &(u64, u64)| (start == at && start < end).then_some(end);
        let end = by_offset.iter().try_fold(0, follows)?;
        (end == weights.get()).then_some(Self { pieces })
    }

    /// The bytes at `size` places from `offset` on, in order.
    pub(crate) fn ranges(&self, offset: Bytes, size: Bytes) -> Vec<ByteRange> {
        let (from, to) = (offset.get(), offset.get().saturating_add(size.get()));
        let first = self.pieces.partition_point(|(place, bytes)| place + (bytes.end - bytes.start) <= from);
        let within = self.pieces[first..].iter().take_while(|(place, _)| *place < to);
        let cut = |(place, bytes): &(u64, Range<u64>)| {
            let skipped = from.saturating_sub(*place);
            let end = (bytes.end - bytes.start).min(to - place);
            ByteRange { offset: bytes.start + skipped, bytes: end - skipped }
        };
        within.map(cut).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(ranges: &[(u64, u64)]) -> Vec<ByteRange> {
        ranges.iter().map(|&(start, end)| ByteRange { offset: start, bytes: end - start }).collect()
    }

    fn order(ranges: &[(u64, u64)]) -> Option<CopyOrder> {
        CopyOrder::new(&told(ranges), Bytes(10))
    }

    #[test]
    fn places_are_the_bytes_that_the_order_has_there() {
        let order = order(&[(4, 6), (0, 4), (6, 10)]).unwrap();
        let check = |offset, size, expected: &[(u64, u64)]| {
            assert_eq!(order.ranges(Bytes(offset), Bytes(size)), told(expected), "{size} from {offset}");
        };
        check(0, 10, &[(4, 6), (0, 4), (6, 10)]);
        check(0, 1, &[(4, 5)]);
        check(1, 3, &[(5, 6), (0, 2)]);
        check(2, 4, &[(0, 4)]);
        check(5, 4, &[(3, 4), (6, 9)]);
        check(9, 1, &[(9, 10)]);
        check(10, 0, &[]);
    }

    #[test]
    fn an_order_has_every_byte_once() {
        assert!(order(&[(0, 10)]).is_some());
        let wrong: [&[(u64, u64)]; 6] =
            [&[], &[(0, 9)], &[(0, 11)], &[(0, 5), (6, 10)], &[(0, 6), (5, 10)], &[(0, 5), (5, 5), (5, 10)]];
        for ranges in wrong {
            assert_eq!(order(ranges), None, "{ranges:?}");
        }
        let endless = ByteRange { offset: 1, bytes: u64::MAX };
        assert_eq!(CopyOrder::new(&[endless], Bytes(10)), None);
    }
}
