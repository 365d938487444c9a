//! The committed checkpoints of a worker: the rules of the replicated state, as far as a worker
//! meets them.

use std::collections::{BTreeMap, BTreeSet};

use millrace_proto::worker as wire;
use millrace_types::{
    Bytes, DataId, FunctionKey, ModelCopy, NodeDelta, SloCounts, SyncBatch, SyncPart, SyncPortion, Usage,
};

/// The committed state of one controller, or of a group that shares it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger {
    pub(crate) epoch: u64,
    /// Number of the last batch of this epoch.
    pub(crate) seq: u64,
    /// Epoch, number and part of each applied batch, in order.
    pub(crate) applied: Vec<(u64, u64, SyncPart)>,
    pub(crate) kept: Kept,
    /// Data that is known to be on no node.
    pub(crate) lost: BTreeSet<DataId>,
    incoming: Option<Kept>,
}

/// The soft state of the node.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Kept {
    pub(crate) models: BTreeMap<ModelCopy, Bytes>,
    pub(crate) entries: BTreeSet<DataId>,
    pub(crate) slo: BTreeMap<FunctionKey, SloCounts>,
    pub(crate) usage: BTreeMap<FunctionKey, Usage>,
}

impl Kept {
    fn take(&mut self, delta: NodeDelta) {
        self.models.retain(|copy, _| !delta.models_gone.contains(copy));
        for id in &delta.entries_gone {
            self.entries.remove(id);
        }
        self.models.extend(delta.models);
        self.entries.extend(delta.entries.into_iter().map(|(id, _)| id));
        self.slo.extend(delta.slo);
        self.usage.extend(delta.usage);
    }
}

impl Ledger {
    /// Commits a batch. Returns the acknowledgement to the worker.
    pub(crate) fn take(&mut self, batch: SyncBatch) -> wire::CheckpointAck {
        let epoch = batch.epoch.0;
        if epoch > self.epoch {
            *self = Self { epoch, applied: std::mem::take(&mut self.applied), ..Self::default() };
        }
        let answer = |seq, full_wanted| wire::CheckpointAck { epoch, seq, full_wanted };
        if batch.seq <= self.seq {
            return answer(self.seq, false);
        }
        let next = batch.seq == self.seq + 1;
        let follows = match batch.part {
            SyncPart::Full(SyncPortion::Only | SyncPortion::First) => true,
            SyncPart::Full(SyncPortion::Middle | SyncPortion::Last) => next && self.incoming.is_some(),
            SyncPart::Delta => next && self.seq > 0 && self.incoming.is_none(),
        };
        if !follows {
            return answer(self.seq, true);
        }
        self.seq = batch.seq;
        self.applied.push((epoch, batch.seq, batch.part));
        if let SyncPart::Full(SyncPortion::Only | SyncPortion::First) = batch.part {
            self.incoming = Some(Kept::default());
        }
        self.incoming.as_mut().unwrap_or(&mut self.kept).take(batch.delta);
        if let SyncPart::Full(SyncPortion::Only | SyncPortion::Last) = batch.part
            && let Some(kept) = self.incoming.take()
        {
            self.kept = kept;
        }
        answer(self.seq, false)
    }

    /// Loses the state, as a controller group does that is rebuilt from nothing.
    pub(crate) fn lose(&mut self) {
        *self = Self { epoch: self.epoch, applied: std::mem::take(&mut self.applied), ..Self::default() };
    }
}
