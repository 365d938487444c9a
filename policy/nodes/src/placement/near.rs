//! Nearness of a copy on a node to the functions that exchange data with the copy (D19).

use std::collections::BTreeMap;

use super::rows::CopyFate;
use super::table::PlanningTable;

/// Nearness of a copy; greater is nearer. Equal on all nodes for a function without a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GroupNearness {
    /// Bytes passed to group members on the node.
    within: u64,
    /// Copies of group members on the node, with or without traffic to them.
    companions: u32,
    /// Whether the node has room for the whole group.
    has_room: bool,
    /// Bytes passed to functions of other groups on the node.
    beyond: u64,
}

/// Bytes that a function passes to the copies that stay on each node: within its group, and beyond.
pub(super) type NodeTraffic = BTreeMap<usize, (u64, u64)>;

impl PlanningTable<'_> {
    /// Returns the bytes that a function passes to the copies that stay on each node.
    pub(super) fn passed(&self, function: usize) -> NodeTraffic {
        let mut passed = NodeTraffic::new();
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

    /// Returns the bytes that a function passes to the copies of its group that stay on a node.
    pub(super) fn passed_within(&self, function: usize, node: usize) -> u64 {
        let near = self.groups.near(function).iter();
        let here = near.filter(|&&(other, _)| {
            self.groups.are_one(function, other)
                && self.functions[other].copies.iter().any(|it| it.node == node && it.fate == CopyFate::Stay)
        });
        here.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the nearness of a copy on a node, which is zero if the node's GPUs have no time for
    /// the copy.
    pub(super) fn nearness(&self, function: usize, node: usize, passed: &NodeTraffic) -> GroupNearness {
        let Some(group) = self.groups.row_of(function) else { return GroupNearness::default() };
        let row = &self.nodes[node];
        if !row.has_time_for(self.functions[function].load) {
            return GroupNearness::default();
        }
        let (within, beyond) = passed.get(&node).copied().unwrap_or_default();
        let companions = group.on(node);
        let has_room = companions > 0 || row.fits(group.bytes) && row.has_time_for(group.load);
        GroupNearness { within, companions, has_room, beyond }
    }
}
