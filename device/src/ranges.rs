//! Sets of byte ranges, for example the loaded or lost bytes of a model. Pure code.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::Error;

/// A set of bytes, stored as the smallest number of half-open ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// Start to end of each range. The ranges are not empty, and neither touch nor overlap.
    ranges: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// Adds all bytes of a range.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let mut start = range.start;
        let mut end = range.end;
        // Merges every range that touches or overlaps the new one.
        while let Some((&other_start, &other_end)) = self.ranges.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.ranges.remove(&other_start);
            start = start.min(other_start);
            end = end.max(other_end);
        }
        self.ranges.insert(start, end);
    }

    /// Removes all bytes of a range.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&start, &end)) = self.ranges.range(..range.end).next_back() {
            if end <= range.start {
                break;
            }
            self.ranges.remove(&start);
            if end > range.end {
                self.ranges.insert(range.end, end);
            }
            if start < range.start {
                self.ranges.insert(start, range.start);
            }
        }
    }

    /// Removes all bytes.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Returns the first part of `range` that is not in the set.
    #[must_use]
    pub fn first_gap(&self, range: Range<u64>) -> Option<Range<u64>> {
        if range.is_empty() {
            return None;
        }
        let covered = self.ranges.range(..=range.start).next_back().map_or(range.start, |(_, &end)| end);
        let start = covered.max(range.start);
        let next = self.ranges.range(start..).next().map_or(range.end, |(&next, _)| next);
        (start < range.end).then(|| start..next.min(range.end))
    }

    /// Whether any byte of `range` is in the set.
    #[must_use]
    pub fn intersects(&self, range: Range<u64>) -> bool {
        let before = self.ranges.range(..range.end).next_back();
        !range.is_empty() && before.is_some_and(|(_, &end)| end > range.start)
    }

    /// Returns the ranges in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
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
