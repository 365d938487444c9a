//! Merges a worker's checkpoint. The next number is applied, an older number is acknowledged again,
//! and a gap asks for a full sync. A checkpoint of a registration that has ended is refused.
//!
//! A full sync arrives in portions. Each named item is visible at once. Items that the sync does
//! not name are removed with its last portion, so that no reader finds a node half emptied.

use std::sync::Arc;

use imbl::ordmap::DiffItem;
use millrace_types::checkpoint::{COUNT_MAX, SYNC_ITEMS_MAX};
use millrace_types::limits::{INDEX_ENTRIES_PER_NODE_MAX, MODELS_PER_NODE_MAX};
use millrace_types::{
    Bytes, DataId, FunctionKey, ModelCopy, NodeDelta, NodeName, SloCounts, SyncBatch, SyncPart, SyncPortion,
    Usage,
};

use crate::checkpoint::{
    CheckpointCoverage, ENTRIES_IN_SYNC_MAX, IncomingSync, NodeCheckpoint, insert_within,
};
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::NodeStatus;
use crate::state::State;
use crate::table::TableRecord as _;

pub(crate) fn sync_node(state: &mut State, name: &NodeName, batch: &SyncBatch) -> CommandOutcome {
    check_epoch(state, name, batch)?;
    check_range(&batch.delta)
        .map_err(|problem| CommandRefusal::InvalidCheckpoint { name: name.clone(), problem })?;
    let known = state.checkpoints.get(name).map(Arc::as_ref);
    let last = known.map_or(0, |checkpoint| checkpoint.seq);
    if batch.seq <= last {
        return Ok(CommandEffect::SyncRepeated { last });
    }
    if !follows(known, batch) {
        return Ok(CommandEffect::ResyncWanted { last });
    }
    // Remove the checkpoint from the table, so that a checkpoint that no snapshot shares is changed
    // in place.
    let mut checkpoint = state.remove_checkpoint(name, batch.epoch);
    merge_batch(state, name, Arc::make_mut(&mut checkpoint), batch);
    state.checkpoints.insert(name.clone(), checkpoint);
    state.synced += 1;
    Ok(CommandEffect::Synced { seq: batch.seq })
}

fn check_epoch(state: &State, name: &NodeName, batch: &SyncBatch) -> Result<(), CommandRefusal> {
    let live = state.nodes.get(name).filter(|node| node.status == NodeStatus::Live);
    let current = live.map(|node| node.epoch);
    if current == Some(batch.epoch) {
        return Ok(());
    }
    Err(CommandRefusal::Fenced { name: name.clone(), epoch: batch.epoch, current })
}

fn check_range(delta: &NodeDelta) -> Result<(), String> {
    if delta.len() > SYNC_ITEMS_MAX {
        return Err(format!("{} items in a batch, at most {SYNC_ITEMS_MAX} are taken", delta.len()));
    }
    for (function, counts) in &delta.slo {
        if counts.m > counts.n || counts.n > COUNT_MAX {
            return Err(format!("{function} served {} of {} requests in time", counts.m, counts.n));
        }
    }
    for (function, usage) in &delta.usage {
        if usage.requests > COUNT_MAX || usage.idle_ms > COUNT_MAX {
            let Usage { requests, idle_ms, .. } = usage;
            return Err(format!("{function} answered {requests} requests and was idle for {idle_ms} ms"));
        }
    }
    Ok(())
}

/// Whether a batch with a new number can be applied to the checkpoint. A full sync may always
/// begin; all other batches have to follow in order.
fn follows(known: Option<&NodeCheckpoint>, batch: &SyncBatch) -> bool {
    let next = known.is_some_and(|checkpoint| batch.seq - checkpoint.seq == 1);
    let syncing = known.is_some_and(NodeCheckpoint::is_syncing);
    let whole = known.is_some_and(|checkpoint| checkpoint.knowledge == CheckpointCoverage::Whole);
    match batch.part {
        SyncPart::Full(SyncPortion::Only | SyncPortion::First) => true,
        SyncPart::Full(SyncPortion::Middle | SyncPortion::Last) => next && syncing,
        SyncPart::Delta => next && whole && !syncing,
    }
}

fn merge_batch(state: &mut State, name: &NodeName, checkpoint: &mut NodeCheckpoint, batch: &SyncBatch) {
    checkpoint.seq = batch.seq;
    if let SyncPart::Full(SyncPortion::Only | SyncPortion::First) = batch.part {
        checkpoint.incoming = Some(IncomingSync::default());
    }
    let delta = &batch.delta;
    models(state, checkpoint, delta);
    for id in &delta.entries_gone {
        drop_entry(state, name, checkpoint, id);
    }
    for (id, bytes) in &delta.entries {
        add_entry(state, name, checkpoint, id, *bytes);
    }
    for (function, counts) in &delta.slo {
        score(state, checkpoint, function, *counts);
    }
    for (function, usage) in &delta.usage {
        bill(state, checkpoint, function, *usage);
    }
    if let Some(alphas) = &delta.alphas
        && state.rules.has_alphas()
    {
        checkpoint.alphas.clone_from(alphas);
    }
    checkpoint.overflow = delta.overflow.unwrap_or(checkpoint.overflow);
    if let SyncPart::Full(SyncPortion::Only | SyncPortion::Last) = batch.part {
        end_full_sync(state, name, checkpoint);
    }
}

fn models(state: &State, checkpoint: &mut NodeCheckpoint, delta: &NodeDelta) {
    for copy in &delta.models_gone {
        checkpoint.models_mut().0.remove::<ModelCopy>(copy);
    }
    for (copy, bytes) in &delta.models {
        let max = capacity_for(state, checkpoint, MODELS_PER_NODE_MAX);
        let (models, dropped) = checkpoint.models_mut();
        if !insert_within(models, copy, *bytes, max) {
            *dropped += 1;
        }
    }
}

/// Returns the maximum number of items of a kind; 0 while all nodes' checkpoints together have no
/// room. Present items may still change then.
fn capacity_for(state: &State, checkpoint: &NodeCheckpoint, max: usize) -> usize {
    let is_full = state.rules.has_state_bounds() && !state.has_checkpoint_capacity(checkpoint.bytes());
    if is_full { 0 } else { max }
}

fn drop_entry(state: &mut State, name: &NodeName, checkpoint: &mut NodeCheckpoint, id: &DataId) {
    if let Some(incoming) = &mut checkpoint.incoming {
        incoming.entries.remove(id);
    }
    if checkpoint.entries.remove(id).is_some() {
        state.index.drop_holder(id, name);
    }
}

fn add_entry(state: &mut State, name: &NodeName, checkpoint: &mut NodeCheckpoint, id: &DataId, bytes: Bytes) {
    let mut max = capacity_for(state, checkpoint, INDEX_ENTRIES_PER_NODE_MAX);
    if let Some(incoming) = &mut checkpoint.incoming {
        if !insert_within(&mut incoming.entries, id, bytes, max) {
            incoming.dropped += 1;
            return;
        }
        max = ENTRIES_IN_SYNC_MAX;
    }
    if insert_within(&mut checkpoint.entries, id, bytes, max) {
        state.index.add_holder(id, name);
    } else if checkpoint.incoming.is_none() {
        checkpoint.dropped += 1;
    }
}

/// Updates a function's score. A deleted function has no score: the node has not heard of its
/// deletion yet.
fn score(state: &mut State, checkpoint: &mut NodeCheckpoint, function: &FunctionKey, counts: SloCounts) {
    if !state.functions.contains_key(function) {
        return;
    }
    let mut score = checkpoint.scores.get(function).copied().unwrap_or_default();
    let counts = score.counts.merge(counts);
    let mut all = state.scores.get(function).copied().unwrap_or_default();
    all.total = all.total.plus(counts.since(score.counts));
    score.counts = counts;
    checkpoint.scores.insert(function.clone(), score);
    state.scores.insert(function.clone(), all);
}

/// Updates a function's usage. A deleted function is billed as long as its name is remembered, because
/// its nodes may report its earlier usage late.
fn bill(state: &mut State, checkpoint: &mut NodeCheckpoint, function: &FunctionKey, usage: Usage) {
    if !state.functions.contains_key(function) && !state.retired.contains_key(function) {
        return;
    }
    let known = checkpoint.usage.get(function).copied().unwrap_or_default();
    let usage = known.merge(usage);
    state.bills.charge(function, usage.since(known));
    checkpoint.usage.insert(function.clone(), usage);
}

fn end_full_sync(state: &mut State, name: &NodeName, checkpoint: &mut NodeCheckpoint) {
    let Some(incoming) = checkpoint.incoming.take() else { return };
    for difference in checkpoint.entries.diff(&incoming.entries) {
        match difference {
            DiffItem::Add(id, _) => state.index.add_holder(id, name),
            DiffItem::Remove(id, _) => state.index.drop_holder(id, name),
            DiffItem::Update { .. } => {}
        }
    }
    checkpoint.entries = incoming.entries;
    checkpoint.models = incoming.models;
    checkpoint.dropped = incoming.dropped;
    checkpoint.knowledge = CheckpointCoverage::Whole;
}

#[cfg(test)]
mod tests;
