//! The invariants of the nodes' checkpoints, the placements, the scores and the bills.
//!
//! A full check takes time in proportion to the data index. The check follows each command only
//! while the index is small. With a larger index, a full check is made after every
//! [`CHECKED_EVERY`]th change, and the other commands check only the node that they name.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::limits::SLICES_PER_GPU_MAX;
use millrace_types::{FunctionKey, NodeName, SloCounts};

use crate::checkpoint::NodeCheckpoint;
use crate::command::StateCommand;
use crate::invariants::InvariantViolation;
use crate::record::NodeStatus;
use crate::state::State;

/// Maximum number of index entries with which every command is followed by a full check.
const CHECKED_WHOLE_MAX: usize = 2_000;
/// Number of changes between two full checks with a larger index.
const CHECKED_EVERY: u64 = 512;

impl State {
    /// Checks the state after a command. Except for the occasional full check, the cost does not
    /// grow with the data index.
    pub(crate) fn check_after(&self, command: &StateCommand) -> Result<(), InvariantViolation> {
        let entries = self.index.held_len() + self.index.lost_len();
        if entries <= CHECKED_WHOLE_MAX || (self.version + self.synced).is_multiple_of(CHECKED_EVERY) {
            return self.check_invariants();
        }
        self.check_records()?;
        match checkpointed_node(command).and_then(|node| self.checkpoints.get_key_value(node)) {
            Some((node, checkpoint)) => self.check_checkpoint(node, checkpoint),
            None => Ok(()),
        }
    }

    /// Checks all placements, checkpoints, scores and bills.
    pub(crate) fn check_soft_state(&self) -> Result<(), InvariantViolation> {
        self.check_placements()?;
        for (node, checkpoint) in &self.checkpoints {
            self.check_checkpoint(node, checkpoint)?;
        }
        self.check_index()?;
        self.check_scores()?;
        if self.bills.is_bounded() { Ok(()) } else { Err(InvariantViolation::Unbounded("billed tenants")) }
    }

    fn check_placements(&self) -> Result<(), InvariantViolation> {
        if !self.placements.is_consistent() {
            return Err(InvariantViolation::Placements);
        }
        for placement in self.placements.all() {
            let name = || format!("the placement of {} on {}", placement.function, placement.node);
            let live = self.nodes.get(&placement.node).is_some_and(|it| it.status == NodeStatus::Live);
            if !live || !self.functions.contains_key(&placement.function) {
                return Err(InvariantViolation::Stray(name()));
            }
            if placement.placed_at > self.clock {
                return Err(InvariantViolation::Future(name()));
            }
        }
        self.check_slices()
    }

    fn check_slices(&self) -> Result<(), InvariantViolation> {
        let mut given = BTreeSet::new();
        let mut counts: BTreeMap<_, usize> = BTreeMap::new();
        for placement in self.placements.all() {
            for slice in &placement.slices {
                if slice.id.0 > self.slices_given || !given.insert(slice.id) {
                    return Err(InvariantViolation::Slice(slice.id));
                }
                *counts.entry((&placement.node, slice.gpu)).or_default() += 1;
            }
        }
        match counts.values().any(|&count| count > SLICES_PER_GPU_MAX) {
            true => Err(InvariantViolation::Unbounded("slices of a GPU")),
            false => Ok(()),
        }
    }

    fn check_checkpoint(
        &self,
        name: &NodeName,
        checkpoint: &NodeCheckpoint,
    ) -> Result<(), InvariantViolation> {
        let stray = || Err(InvariantViolation::Stray(format!("the checkpoint of {name}")));
        let live = self.nodes.get(name).filter(|node| node.status == NodeStatus::Live);
        if live.is_none_or(|node| node.epoch != checkpoint.epoch) {
            return stray();
        }
        if !checkpoint.is_bounded() {
            return Err(InvariantViolation::Unbounded("items of a node"));
        }
        let scored = checkpoint.scores.iter().all(|(function, score)| {
            let m = score.base.m.checked_add_unsigned(score.counts.m);
            let n = score.base.n;
            self.functions.contains_key(function)
                && m.is_some_and(|m| m >= 0)
                && n.checked_add_unsigned(score.counts.n).is_some_and(|n| n >= 0)
        });
        let known = |function: &FunctionKey| {
            self.functions.contains_key(function) || self.retired.contains_key(function)
        };
        if scored && checkpoint.usage.keys().all(known) { Ok(()) } else { stray() }
    }

    /// Checks that the index lists exactly the entries of the checkpoints.
    fn check_index(&self) -> Result<(), InvariantViolation> {
        let mut entries = 0;
        for (node, checkpoint) in &self.checkpoints {
            entries += checkpoint.entries.len();
            let named = |id| self.index.holders(id).is_some_and(|holders| holders.contains(node));
            if !checkpoint.entries.keys().all(named) {
                return Err(InvariantViolation::Index);
            }
        }
        let exact = entries == self.index.holdings() && self.index.is_consistent(self.version);
        if exact { Ok(()) } else { Err(InvariantViolation::Index) }
    }

    /// Checks that no request is forgotten or counted twice when replicas come and go.
    fn check_scores(&self) -> Result<(), InvariantViolation> {
        let mut sums: BTreeMap<&FunctionKey, SloCounts> = BTreeMap::new();
        for (function, score) in self.checkpoints.values().flat_map(|checkpoint| &checkpoint.scores) {
            let sum = sums.entry(function).or_default();
            *sum = sum.plus(score.effective());
        }
        for (function, score) in &self.scores {
            let sum = sums.remove(function).unwrap_or_default();
            if sum.plus(score.unclaimed) != score.total {
                return Err(InvariantViolation::Score(function.clone()));
            }
        }
        match sums.into_iter().find(|(_, sum)| *sum != SloCounts::default()) {
            Some((function, _)) => Err(InvariantViolation::Score(function.clone())),
            None => Ok(()),
        }
    }
}

/// Returns the node whose checkpoint a command changes.
fn checkpointed_node(command: &StateCommand) -> Option<&NodeName> {
    match command {
        StateCommand::SyncNode { node, .. }
        | StateCommand::Place { node, .. }
        | StateCommand::Unplace { node, .. } => Some(node),
        _ => None,
    }
}
