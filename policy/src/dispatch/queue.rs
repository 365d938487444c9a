//! The node's queue: first come first served, in one line per size class, so that a request whose
//! model only fits the larger GPUs never holds up one that fits the others.

use std::collections::BTreeMap;

use millrace_types::ModelId;

use crate::attempts::Attempts;
use crate::ids::RequestKey;

/// Which GPUs a model fits: those of this size rank and above. Most nodes have one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeRank(pub(super) usize);

/// A request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) key: RequestKey,
    pub(super) model: ModelId,
    pub(super) attempts: Attempts,
}

/// Requests by the order in which the worker accepted them. One that comes back from a lost GPU
/// therefore stands where it stood before.
#[derive(Debug)]
pub(super) struct Queue {
    lines: Vec<BTreeMap<RequestKey, Waiting>>,
    len: usize,
}

impl Queue {
    pub(super) fn new(ranks: usize) -> Self {
        Self { lines: vec![BTreeMap::new(); ranks], len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn insert(&mut self, rank: SizeRank, request: Waiting) {
        self.lines[rank.0].insert(request.key, request);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, rank: SizeRank, key: RequestKey) -> Option<Waiting> {
        let request = self.lines[rank.0].remove(&key)?;
        self.len -= 1;
        Some(request)
    }

    /// The first of each line, the oldest of them first.
    pub(super) fn fronts(&self, into: &mut Vec<(SizeRank, Waiting)>) {
        into.clear();
        let fronts = self.lines.iter().enumerate();
        into.extend(fronts.filter_map(|(rank, line)| Some((SizeRank(rank), *line.first_key_value()?.1))));
        into.sort_unstable_by_key(|(_, request)| request.key);
    }
}
