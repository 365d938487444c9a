//! The placements and the nodes' checkpoints: read methods, and changes that several commands
//! share.

use std::ops::Bound;
use std::sync::Arc;

use millrace_types::{DataId, Epoch, FunctionKey, NodeName, SloBase, SloCounts, Usage};

use crate::accounts::{BillAccount, FunctionScore};
use crate::checkpoint::{NodeCheckpoint, ReplicaScore};
use crate::index::{DataLocation, home_of};
use crate::record::{FunctionRecord, PlacementRecord};
use crate::state::State;

impl State {
    /// Returns every placement, by function and node.
    pub fn placements(&self) -> impl Iterator<Item = &Arc<PlacementRecord>> {
        self.placements.all()
    }

    #[must_use]
    pub fn placements_len(&self) -> usize {
        self.placements.len()
    }

    /// Returns the placements of a function, by node.
    pub fn placements_of<'a>(
        &'a self,
        function: &'a FunctionKey,
    ) -> impl Iterator<Item = &'a Arc<PlacementRecord>> + use<'a> {
        self.placements.of(function)
    }

    /// Returns the functions placed on a node, by key.
    pub fn placements_on<'a>(
        &'a self,
        node: &'a NodeName,
    ) -> impl Iterator<Item = &'a FunctionKey> + use<'a> {
        self.placements.on(node)
    }

    /// Returns a live node's checkpoint; `None` before its first report or score.
    #[must_use]
    pub fn checkpoint(&self, node: &NodeName) -> Option<&Arc<NodeCheckpoint>> {
        self.checkpoints.get(node)
    }

    /// Returns every live node's checkpoint, by name.
    pub fn checkpoints(&self) -> impl Iterator<Item = (&NodeName, &Arc<NodeCheckpoint>)> {
        self.checkpoints.iter()
    }

    /// Returns the number of merged checkpoints, which grows by one with each.
    #[must_use]
    pub fn synced(&self) -> u64 {
        self.synced
    }

    /// Returns the location of a piece of data.
    #[must_use]
    pub fn locate(&self, id: &DataId) -> DataLocation {
        if let Some(holders) = self.index.holders(id) {
            let home = home_of(id, holders);
            let entry = self.checkpoints.get(&home).and_then(|checkpoint| checkpoint.entries.get(id));
            let bytes = entry.copied().expect("each node in the index has a checkpoint with the data");
            return DataLocation::Held { home, holders: holders.clone(), bytes };
        }
        match self.index.lost(id) {
            Some(lost) => DataLocation::Lost { bytes: lost.bytes },
            None => DataLocation::Unknown,
        }
    }

    /// Returns the number of pieces of data that live nodes hold.
    #[must_use]
    pub fn index_held_len(&self) -> usize {
        self.index.held_len()
    }

    /// Returns the number of pieces of data that are known to be lost.
    #[must_use]
    pub fn index_lost_len(&self) -> usize {
        self.index.lost_len()
    }

    /// Returns a function's score over every node and epoch.
    #[must_use]
    pub fn score(&self, function: &FunctionKey) -> FunctionScore {
        self.scores.get(function).copied().unwrap_or_default()
    }

    /// Returns the counts that a node adds to a function's reported counts.
    #[must_use]
    pub fn slo_base(&self, function: &FunctionKey, node: &NodeName) -> SloBase {
        let score = self.checkpoints.get(node).and_then(|checkpoint| checkpoint.scores.get(function));
        score.map_or_else(SloBase::default, |score| score.base)
    }

    /// Returns a function's checkpointed usage over every node and epoch.
    #[must_use]
    pub fn usage(&self, function: &FunctionKey) -> Usage {
        self.bills.of(function)
    }

    /// Whether a checkpointed request was answered by the function since its creation. A request of
    /// an earlier function of the same name counts too, if a node reported it after the creation.
    #[must_use]
    pub fn has_answered_requests(&self, function: &FunctionRecord) -> bool {
        self.usage(&function.key).requests > function.requests_before
    }

    /// Returns the usage of each function, by key.
    pub fn usages(&self) -> impl Iterator<Item = (&FunctionKey, &Usage)> {
        self.bills.functions()
    }

    /// Returns the bills from the account `from` on, in order: the next page of a listing.
    pub fn bills(&self, from: Bound<&BillAccount>) -> impl Iterator<Item = (BillAccount, Usage)> {
        self.bills.list(from)
    }

    /// Removes a live node's checkpoint from the table, so that it can be changed and inserted
    /// again. Returns a new checkpoint if there is none.
    pub(crate) fn remove_checkpoint(&mut self, node: &NodeName, epoch: Epoch) -> Arc<NodeCheckpoint> {
        self.checkpoints.remove(node).unwrap_or_else(|| Arc::new(NodeCheckpoint::for_epoch(epoch)))
    }

    pub(crate) fn change_score(
        &mut self,
        node: &NodeName,
        function: &FunctionKey,
        change: impl FnOnce(&mut ReplicaScore),
    ) {
        let Some(epoch) = self.nodes.get(node).map(|node| node.epoch) else { return };
        let mut checkpoint = self.remove_checkpoint(node, epoch);
        let mut score = checkpoint.scores.get(function).copied().unwrap_or_default();
        change(&mut score);
        Arc::make_mut(&mut checkpoint).scores.insert(function.clone(), score);
        self.checkpoints.insert(node.clone(), checkpoint);
    }

    /// Takes the effective counts of a function's replica away from a node, and leaves them to the
    /// next placement. The node's later counts are counted once, because its new base offsets the
    /// counts reported so far.
    pub(crate) fn settle_score(&mut self, function: &FunctionKey, node: &NodeName) {
        let known = self.checkpoints.get(node).and_then(|checkpoint| checkpoint.scores.get(function));
        let Some(score) = known.copied() else { return };
        self.add_unclaimed_counts(function, score.effective());
        self.change_score(node, function, |score| score.base = SloBase::settling(score.counts));
    }

    /// Leaves a replica's effective counts to the function's next placement.
    pub(crate) fn add_unclaimed_counts(&mut self, function: &FunctionKey, counts: SloCounts) {
        if counts == SloCounts::default() {
            return;
        }
        let mut all = self.scores.get(function).copied().unwrap_or_default();
        all.unclaimed = all.unclaimed.plus(counts);
        self.scores.insert(function.clone(), all);
    }

    /// Removes everything of a function except its revisions and its bill.
    pub(crate) fn drop_placements_and_scores(&mut self, function: &FunctionKey) {
        let nodes: Vec<_> = self.placements.of(function).map(|placement| placement.node.clone()).collect();
        for node in &nodes {
            self.placements.remove(function, node);
        }
        self.scores.remove(function);
        self.change_checkpoints_with(
            |checkpoint| checkpoint.scores.contains_key(function),
            |checkpoint| {
                checkpoint.scores.remove(function);
            },
        );
    }

    /// Forgets the usage of a deleted function, in the bills and in each node's checkpoint.
    pub(crate) fn forget_usage(&mut self, function: &FunctionKey) {
        self.bills.forget(function);
        self.change_checkpoints_with(
            |checkpoint| checkpoint.usage.contains_key(function),
            |checkpoint| {
                checkpoint.usage.remove(function);
            },
        );
    }

    fn change_checkpoints_with(
        &mut self,
        concerns: impl Fn(&NodeCheckpoint) -> bool,
        change: impl Fn(&mut NodeCheckpoint),
    ) {
        let names: Vec<_> =
            self.checkpoints.iter().filter(|(_, it)| concerns(it)).map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.checkpoints.change(name, &change);
        }
    }

    /// Rebuilds the part of the state that is not stored: the holders of each piece of data.
    pub(crate) fn rebuild_index(&mut self) {
        for (node, checkpoint) in &self.checkpoints {
            for id in checkpoint.entries.keys() {
                self.index.add_holder(id, node);
            }
        }
    }
}
