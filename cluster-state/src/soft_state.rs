//! What nodes told of themselves and what is wished of them: how it is read, and the changes that
//! several commands share.

use std::ops::Bound;
use std::sync::Arc;

use millrace_types::{DataId, Epoch, FunctionKey, NodeName, SloBase, SloCounts, Usage};

use crate::accounts::{Account, FunctionScore};
use crate::checkpoint::{Checkpoint, Score};
use crate::index::{Located, home_of};
use crate::record::{Function, Placement};
use crate::state::State;

impl State {
    /// Every placement, by function and node.
    pub fn placements(&self) -> impl Iterator<Item = &Arc<Placement>> {
        self.placements.all()
    }

    /// How many placements there are.
    #[must_use]
    pub fn placements_len(&self) -> usize {
        self.placements.len()
    }

    /// The placements of a function, by node.
    pub fn placements_of<'a>(
        &'a self,
        function: &'a FunctionKey,
    ) -> impl Iterator<Item = &'a Arc<Placement>> + use<'a> {
        self.placements.of(function)
    }

    /// The functions placed on a node, by key.
    pub fn placements_on<'a>(
        &'a self,
        node: &'a NodeName,
    ) -> impl Iterator<Item = &'a FunctionKey> + use<'a> {
        self.placements.on(node)
    }

    /// What a live node told of its soft state; `None` before it said anything.
    #[must_use]
    pub fn checkpoint(&self, node: &NodeName) -> Option<&Arc<Checkpoint>> {
        self.checkpoints.get(node)
    }

    /// Every live node's checkpoint, by name.
    pub fn checkpoints(&self) -> impl Iterator<Item = (&NodeName, &Arc<Checkpoint>)> {
        self.checkpoints.iter()
    }

    /// Grows by one with each checkpoint taken.
    #[must_use]
    pub fn synced(&self) -> u64 {
        self.synced
    }

    /// Where a piece of data is.
    #[must_use]
    pub fn locate(&self, id: &DataId) -> Located {
        if let Some(holders) = self.index.holders(id) {
            let home = home_of(id, holders);
            let entry = self.checkpoints.get(&home).and_then(|checkpoint| checkpoint.entries.get(id));
            let bytes = entry.copied().expect("the index names only nodes whose checkpoints hold the data");
            return Located::Held { home, holders: holders.clone(), bytes };
        }
        match self.index.lost(id) {
            Some(lost) => Located::Lost { bytes: lost.bytes },
            None => Located::Unknown,
        }
    }

    /// How many pieces of data some live node holds.
    #[must_use]
    pub fn index_held_len(&self) -> usize {
        self.index.held_len()
    }

    /// How many pieces of data are known to be lost.
    #[must_use]
    pub fn index_lost_len(&self) -> usize {
        self.index.lost_len()
    }

    /// How a function did, over every node and epoch.
    #[must_use]
    pub fn score(&self, function: &FunctionKey) -> FunctionScore {
        self.scores.get(function).copied().unwrap_or_default()
    }

    /// What a node adds to the counts of a function that it reports.
    #[must_use]
    pub fn slo_base(&self, function: &FunctionKey, node: &NodeName) -> SloBase {
        let score = self.checkpoints.get(node).and_then(|checkpoint| checkpoint.scores.get(function));
        score.map_or_else(SloBase::default, |score| score.base)
    }

    /// What a function used, over every node and epoch, as far as it was checkpointed.
    #[must_use]
    pub fn usage(&self, function: &FunctionKey) -> Usage {
        self.bills.of(function)
    }

    /// Whether a function answered a request since it was created, as far as it was checkpointed. What
    /// nodes had not told of another of its name by then counts as its own.
    #[must_use]
    pub fn ran(&self, function: &Function) -> bool {
        self.usage(&function.key).requests > function.requests_before
    }

    /// What each function used, by key.
    pub fn usages(&self) -> impl Iterator<Item = (&FunctionKey, &Usage)> {
        self.bills.functions()
    }

    /// What was used, by account from `from` on: a listing's next page.
    pub fn bills(&self, from: Bound<&Account>) -> impl Iterator<Item = (Account, Usage)> {
        self.bills.list(from)
    }

    /// Takes a live node's checkpoint out, to be changed and put back; a new one if there is none.
    pub(crate) fn take_checkpoint(&mut self, node: &NodeName, epoch: Epoch) -> Arc<Checkpoint> {
        self.checkpoints.remove(node).unwrap_or_else(|| Arc::new(Checkpoint::begun(epoch)))
    }

    /// Changes a function's score on a live node.
    pub(crate) fn change_score(
        &mut self,
        node: &NodeName,
        function: &FunctionKey,
        change: impl FnOnce(&mut Score),
    ) {
        let Some(epoch) = self.nodes.get(node).map(|node| node.epoch) else { return };
        let mut checkpoint = self.take_checkpoint(node, epoch);
        let mut score = checkpoint.scores.get(function).copied().unwrap_or_default();
        change(&mut score);
        Arc::make_mut(&mut checkpoint).scores.insert(function.clone(), score);
        self.checkpoints.insert(node.clone(), checkpoint);
    }

    /// Takes from a node what its replica of a function went by. What it counts from here on is
    /// counted once: its base makes up for what it has reported.
    pub(crate) fn settle(&mut self, function: &FunctionKey, node: &NodeName) {
        let known = self.checkpoints.get(node).and_then(|checkpoint| checkpoint.scores.get(function));
        let Some(score) = known.copied() else { return };
        self.leave_unclaimed(function, score.effective());
        self.change_score(node, function, |score| score.base = SloBase::settling(score.counts));
    }

    /// Leaves what a replica went by to the function's next placement.
    pub(crate) fn leave_unclaimed(&mut self, function: &FunctionKey, counts: SloCounts) {
        if counts == SloCounts::default() {
            return;
        }
        let mut all = self.scores.get(function).copied().unwrap_or_default();
        all.unclaimed = all.unclaimed.plus(counts);
        self.scores.insert(function.clone(), all);
    }

    /// Drops what is kept of a function besides its revisions and its bill.
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

    /// A deleted function is not remembered any more: nor is what each node used for it.
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
        concerns: impl Fn(&Checkpoint) -> bool,
        change: impl Fn(&mut Checkpoint),
    ) {
        let names: Vec<_> =
            self.checkpoints.iter().filter(|(_, it)| concerns(it)).map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.checkpoints.change(name, &change);
        }
    }

    /// Makes what is not stored from what is: who holds which data.
    pub(crate) fn rebuild(&mut self) {
        for (node, checkpoint) in &self.checkpoints {
            for id in checkpoint.entries.keys() {
                self.index.hold(id, node);
            }
        }
    }
}
