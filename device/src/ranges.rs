//! Sets of byte ranges, for example the loaded or lost bytes of a model. Pure code.

use std::ops::Range;

use crate::error::Error;

/// A set of bytes, stored as the smallest number of half-open ranges. An empty range changes nothing and
/// intersects nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: rangemap::RangeSet<u64>,
}

impl RangeSet {
    /// Adds all bytes of a range.
    pub fn insert(&mut self, range: Range<u64>) {
        // The library panics at an empty range.
        if !range.is_empty() {
            self.ranges.insert(range);
        }
    }

    /// Removes all bytes of a range.
    pub fn remove(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.ranges.remove(range);
        }
    }

    /// Removes all bytes.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Returns the first part of `range` that is not in the set.
    #[must_use]
    pub fn first_gap(&self, range: Range<u64>) -> Option<Range<u64>> {
        if range.is_empty() { None } else { self.ranges.gaps(&range).next() }
    }

    /// Whether any byte of `range` is in the set.
    #[must_use]
    pub fn intersects(&self, range: Range<u64>) -> bool {
        !range.is_empty() && self.ranges.overlaps(&range)
    }

    /// Returns the ranges in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().cloned()
    }

    /// Returns the number of bytes in the set.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.iter().map(|range| range.end - range.start).sum()
    }
}

/// Checks that the parts of a region, in ascending order, start at multiples of `unit`, are within its
/// `bytes` bytes, and do not overlap.
pub(crate) fn check_parts<'a>(
    sorted: impl Iterator<Item = &'a Range<u64>>,
    unit: u64,
    bytes: u64,
) -> Result<(), Error> {
    let mut end = 0;
    for range in sorted {
        let problem = if !range.start.is_multiple_of(unit) {
            "does not start at a multiple of the granularity"
        } else if range.end > bytes {
            "past the end of the region"
        } else if range.start < end {
            "overlaps another"
        } else {
            end = range.end;
            continue;
        };
        return Err(Error::BadExtent { offset: range.start, bytes: range.end - range.start, problem });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: u64 = 64;

    fn range() -> impl Strategy<Value = Range<u64>> {
        (0..SPAN, 0..SPAN).prop_map(|(a, b)| a.min(b)..a.max(b))
    }

    proptest! {
        #[test]
        fn range_set_agrees_with_a_bitmap(steps in prop::collection::vec((any::<bool>(), range()), 0..40), probe in range()) {
            let mut set = RangeSet::default();
            let mut bits = [false; SPAN as usize];
            for (insert, range) in steps {
                bits[range.start as usize..range.end as usize].fill(insert);
                if insert { set.insert(range) } else { set.remove(range) }
            }
            prop_assert_eq!(set.bytes(), bits.iter().filter(|bit| **bit).count() as u64);
            let ranges: Vec<_> = set.iter().collect();
            for pair in ranges.windows(2) {
                prop_assert!(pair[0].end < pair[1].start, "{:?} touch", pair);
            }
            let within = &bits[probe.start as usize..probe.end as usize];
            prop_assert_eq!(set.first_gap(probe.clone()).is_none(), within.iter().all(|bit| *bit));
            prop_assert_eq!(set.intersects(probe.clone()), within.iter().any(|bit| *bit));
            let gap = within.iter().position(|bit| !bit).map(|start| {
                let length = within[start..].iter().position(|bit| *bit).unwrap_or(within.len() - start);
                probe.start + start as u64..probe.start + (start + length) as u64
            });
            prop_assert_eq!(set.first_gap(probe), gap);
        }
    }
}
