//! Groups of prioritised and other functions (T19, appendix A.3). Functions are sorted by required
//! request count. The prioritised group is the longest prefix with a sum of at most alpha times the
//! sum of all. An update costs the logarithm of the number of functions, plus the functions that
//! cross the border.

use std::collections::BTreeSet;

use super::required::RequiredRequestCount;
use millrace_core::ids::FunctionIndex;

/// Value of alpha that stands for 1: alpha is stored in billionths.
pub(super) const ALPHA_ONE: u64 = 1_000_000_000;

/// Functions in two groups, separated by a border in the order of required request counts.
#[derive(Debug)]
pub(super) struct PriorityGroups {
    alpha: u64,
    high: BTreeSet<(RequiredRequestCount, FunctionIndex)>,
    low: BTreeSet<(RequiredRequestCount, FunctionIndex)>,
    /// Sum of the positive required request counts in the high group.
    high_due: i128,
    /// Sum of all positive required request counts.
    due: i128,
}

impl PriorityGroups {
    /// Creates empty groups with alpha 1, so that all functions are prioritised.
    pub(super) fn new() -> Self {
        Self { alpha: ALPHA_ONE, high: BTreeSet::new(), low: BTreeSet::new(), high_due: 0, due: 0 }
    }

    pub(super) fn insert(&mut self, required: RequiredRequestCount, function: FunctionIndex) {
        self.due += required.due();
        if self.low.first().is_none_or(|&first| (required, function) < first) {
            self.high.insert((required, function));
            self.high_due += required.due();
        } else {
            self.low.insert((required, function));
        }
    }

    pub(super) fn remove(&mut self, required: RequiredRequestCount, function: FunctionIndex) {
        if self.high.remove(&(required, function)) {
            self.high_due -= required.due();
        } else if !self.low.remove(&(required, function)) {
            return;
        }
        self.due -= required.due();
    }

    pub(super) fn is_high(&self, required: RequiredRequestCount, function: FunctionIndex) -> bool {
        self.high.contains(&(required, function))
    }

    pub(super) fn set_alpha(&mut self, alpha: u64) {
        self.alpha = alpha.min(ALPHA_ONE);
    }

    /// Moves the border to its position, and adds the functions that crossed the border to `moved`.
    pub(super) fn settle(&mut self, moved: &mut Vec<FunctionIndex>) {
        let within =
            |high: i128, due: i128, alpha: u64| high * i128::from(ALPHA_ONE) <= i128::from(alpha) * due;
        while !within(self.high_due, self.due, self.alpha)
            && let Some((required, function)) = self.high.pop_last()
        {
            self.high_due -= required.due();
            self.low.insert((required, function));
            moved.push(function);
        }
        while let Some(&(required, function)) = self.low.first()
            && within(self.high_due + required.due(), self.due, self.alpha)
        {
            self.low.pop_first();
            self.high_due += required.due();
            self.high.insert((required, function));
            moved.push(function);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn function(index: usize) -> FunctionIndex {
        FunctionIndex(index as u32)
    }

    fn groups(required: &[i128], alpha: u64) -> PriorityGroups {
        let mut groups = PriorityGroups::new();
        groups.set_alpha(alpha);
        for (index, &required) in required.iter().enumerate() {
            groups.insert(RequiredRequestCount(required), function(index));
            groups.settle(&mut Vec::new());
        }
        groups
    }

    fn high(groups: &PriorityGroups, required: &[i128]) -> Vec<usize> {
        let is_high =
            |index: &usize| groups.is_high(RequiredRequestCount(required[*index]), function(*index));
        (0..required.len()).filter(is_high).collect()
    }

    /// T19, T21: a function with no positive count is always in the high group.
    #[test]
    fn alpha_places_the_border_as_in_the_paper() {
        let required = [30, -5, 10, 0, 20];
        let high = |alpha| high(&groups(&required, alpha), &required);
        assert_eq!(high(ALPHA_ONE), [0, 1, 2, 3, 4], "at 1 all functions");
        assert_eq!(high(0), [1, 3], "at 0 the functions with no positive count");
        assert_eq!(high(ALPHA_ONE / 2), [1, 2, 3, 4], "30 of 60 is within half");
        assert_eq!(high(ALPHA_ONE / 2 - 1), [1, 2, 3]);
        assert_eq!(self::high(&groups(&[-3, 0], 0), &[-3, 0]), [0, 1], "no positive count");
    }

    proptest! {
        /// After any sequence of changes, the border is at its defined position.
        #[test]
        fn border_is_at_the_longest_prefix_within_alpha(
            changes in prop::collection::vec((0..12usize, -50..50i128, 0..=4u64), 1..60)
        ) {
            let mut groups = PriorityGroups::new();
            let mut now = [None::<i128>; 12];
            for (index, required, quarters) in changes {
                if let Some(before) = now[index].replace(required) {
                    groups.remove(RequiredRequestCount(before), function(index));
                }
                groups.insert(RequiredRequestCount(required), function(index));
                let alpha = ALPHA_ONE / 4 * quarters;
                groups.set_alpha(alpha);
                groups.settle(&mut Vec::new());
                let mut sorted: Vec<_> =
                    now.iter().enumerate().filter_map(|(index, it)| Some((RequiredRequestCount((*it)?), function(index)))).collect();
                sorted.sort();
                let due: i128 = sorted.iter().map(|(required, _)| required.due()).sum();
                let mut sum = 0;
                for (required, function) in sorted {
                    sum += required.due();
                    let within = sum * i128::from(ALPHA_ONE) <= i128::from(alpha) * due;
                    prop_assert_eq!(groups.is_high(required, function), within);
                }
            }
        }
    }
}
