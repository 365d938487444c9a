//! The order in which the weights of an opaque program are copied: as executors recorded that they are read
//! first (T06; [`millrace_model::order`]). Pure.
//!
//! The fabric grants a model's chunks from the first to the last and knows of no order. So for a program
//! with one, a chunk is a place in it, and which bytes are there is looked up here as the grant goes to
//! the executor. A mapping keeps the order that it began with: part of it may be there already when
//! another is recorded.

use std::num::NonZeroU64;
use std::ops::Range;

use millrace_model::order::ReadOrder;
use millrace_proto::executor::{ByteRange, LaunchReads};
use millrace_types::Bytes;

/// All bytes of a program's weights, in the order in which to copy them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CopyOrder {
    /// Where each piece begins in the order, and which bytes it is.
    pieces: Vec<(u64, Range<u64>)>,
    /// What it is by.
    reads: ReadOrder,
}

impl CopyOrder {
    /// The order by what an executor told that launches read first, of a program that is recorded in blocks
    /// of this size; `None` where that names bytes which the program has not.
    pub(crate) fn new(first_reads: &[LaunchReads], weights: Bytes, block: NonZeroU64) -> Option<Self> {
        let range = |told: &ByteRange| Some(told.offset..told.offset.checked_add(told.bytes)?);
        let ranges = |launch: &LaunchReads| launch.ranges.iter().map(range).collect::<Option<Vec<_>>>();
        let reads = first_reads.iter().map(ranges).collect::<Option<Vec<_>>>()?;
        ReadOrder::recorded(weights.get(), block, &reads).map(Self::by)
    }

    /// The order by this and by what was known before: nothing of that is lost.
    pub(crate) fn after(self, known: &Self) -> Self {
        Self::by(self.reads.after(&known.reads))
    }

    fn by(reads: ReadOrder) -> Self {
        let (mut place, mut pieces) = (0, Vec::new());
        for bytes in reads.copy_order() {
            let size = bytes.end - bytes.start;
            pieces.push((place, bytes));
            place += size;
        }
        Self { pieces, reads }
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

    /// By what each launch reads first, of ten bytes in blocks of two.
    fn order(launches: &[&[(u64, u64)]]) -> Option<CopyOrder> {
        let reads: Vec<_> = launches.iter().map(|ranges| LaunchReads { ranges: told(ranges) }).collect();
        CopyOrder::new(&reads, Bytes(10), NonZeroU64::new(2).unwrap())
    }

    #[test]
    fn places_are_the_bytes_that_the_order_has_there() {
        let order = order(&[&[(4, 6)], &[(0, 4)]]).unwrap();
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
    fn an_order_is_of_bytes_that_the_program_has() {
        assert!(order(&[&[], &[(0, 10)]]).is_some());
        assert_eq!(order(&[&[(0, 2)], &[(8, 11)]]), None);
        let endless = LaunchReads { ranges: vec![ByteRange { offset: 1, bytes: u64::MAX }] };
        assert_eq!(CopyOrder::new(&[endless], Bytes(10), NonZeroU64::new(2).unwrap()), None);
    }

    #[test]
    fn an_executor_that_is_new_to_a_program_makes_nobody_forget() {
        let all = |order: &CopyOrder| order.ranges(Bytes(0), Bytes(10));
        // It goes one way or the other: the last block is read, or one in between.
        let both = order(&[&[(4, 6)], &[(8, 10), (2, 4)]]).unwrap();
        let one = order(&[&[(4, 6)], &[(2, 4)]]).unwrap();
        assert_eq!(
            all(&one),
            told(&[(4, 6), (2, 4), (0, 2), (6, 10)]),
            "it has not seen the last block read"
        );
        assert_eq!(all(&one.clone().after(&both)), told(&[(4, 6), (2, 4), (8, 10), (0, 2), (6, 8)]));
        assert_eq!(both.clone().after(&one), both);
    }
}
