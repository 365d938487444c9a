//! Groups of functions that belong on one node, with the traffic between functions.

use std::collections::BTreeMap;

/// The groups, and the traffic between functions. Empty without flows.
#[derive(Debug, Default)]
pub(super) struct FunctionGroups {
    /// Each function's group; `None` for a function without a group.
    pub(super) of: Vec<Option<usize>>,
    /// Partners that each function passes data to or from, with the bytes.
    pub(super) near: Vec<Vec<(usize, u64)>>,
    pub(super) rows: Vec<GroupRow>,
}

#[derive(Debug)]
pub(super) struct GroupRow {
    /// First function of the group.
    pub(super) first: usize,
    /// Host memory that all its models need.
    pub(super) bytes: u64,
    /// Expected load of a copy of each function.
    pub(super) load: u64,
    /// Copies that stay, by node.
    pub(super) copies: BTreeMap<usize, u32>,
}

impl FunctionGroups {
    /// Returns a function's group.
    pub(super) fn row_of(&self, function: usize) -> Option<&GroupRow> {
        Some(&self.rows[self.number_of(function)?])
    }

    fn number_of(&self, function: usize) -> Option<usize> {
        self.of.get(function).copied().flatten()
    }

    /// Returns whether two functions are in the same group.
    pub(super) fn are_one(&self, a: usize, b: usize) -> bool {
        self.number_of(a).is_some_and(|group| self.number_of(b) == Some(group))
    }

    /// Returns the partners that a function passes data to or from, with the bytes.
    pub(super) fn near(&self, function: usize) -> &[(usize, u64)] {
        self.near.get(function).map_or(&[], Vec::as_slice)
    }

    /// Records that a copy was placed and stays.
    pub(super) fn came(&mut self, function: usize, node: usize) {
        if let Some(group) = self.number_of(function) {
            *self.rows[group].copies.entry(node).or_insert(0) += 1;
        }
    }

    /// Records that a copy no longer stays.
    pub(super) fn left(&mut self, function: usize, node: usize) {
        if let Some(group) = self.number_of(function) {
            self.rows[group].copies.entry(node).and_modify(|copies| *copies -= 1);
        }
    }
}

impl GroupRow {
    /// Returns the number of copies of its functions that stay on a node.
    pub(super) fn on(&self, node: usize) -> u32 {
        self.copies.get(&node).copied().unwrap_or(0)
    }
}
