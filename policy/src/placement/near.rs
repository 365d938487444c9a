//! How near a copy on a node is, or would be, to what it passes data to (D19).

use std::collections::BTreeMap;

use super::rows::Fate;
use super::table::Table;

/// More is nearer. All the same for a function that is of no group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Nearness {
    /// Bytes that it passes to those of its group that are on the node.
    within: u64,
    /// Copies of its group on the node, whether or not it passes anything to them.
    companions: u32,
    /// Whether the node has room for all of the group.
    has_room: bool,
    /// Bytes that it passes to those of other groups that are on the node.
    beyond: u64,
}

/// What a function passes to those that stay on each node: within its group, and beyond.
pub(super) type Passed = BTreeMap<usize, (u64, u64)>;

impl Table<'_> {
    /// What a function passes to those that stay on each node.
    pub(super) fn passed(&self, function: usize) -> Passed {
        let mut passed = Passed::new();
        for &(other, bytes) in self.groups.near(function) {
            let is_one = self.groups.are_one(function, other);
            for node in self.functions[other].staying_on() {
                let (within, beyond) = passed.entry(node).or_default();
                let to = if is_one { within } else { beyond };
                *to = to.saturating_add(bytes);
            }
        }
        passed
    }

    /// Bytes that a function passes to those of its group that stay on a node.
    pub(super) fn passed_within(&self, function: usize, node: usize) -> u64 {
        let near = self.groups.near(function).iter();
        let here = near.filter(|&&(other, _)| {
            self.groups.are_one(function, other)
                && self.functions[other].copies.iter().any(|it| it.node == node && it.fate == Fate::Stay)
        });
        here.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// How near a copy on a node would be. Nothing where the node's GPUs have no time for it.
    pub(super) fn nearness(&self, function: usize, node: usize, passed: &Passed) -> Nearness {
        let Some(group) = self.groups.row_of(function) else { return Nearness::default() };
        let row = &self.nodes[node];
        if !row.has_time_for(self.functions[function].load) {
            return Nearness::default();
        }
        let (within, beyond) = passed.get(&node).copied().unwrap_or_default();
        let companions = group.on(node);
        let has_room = companions > 0 || row.fits(group.bytes) && row.has_time_for(group.load);
        Nearness { within, companions, has_room, beyond }
    }
}
