//! A request that waits, and the order of age.

use std::collections::BTreeMap;

use millrace_types::{Priority, Timestamp};

use super::models::Slot;
use crate::attempts::Attempts;
use crate::ids::{FunctionIndex, RequestKey};

/// Which GPUs a model fits: those of this size rank and above. Most nodes have one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeRank(pub(super) usize);

/// A request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) key: RequestKey,
    pub(super) function: FunctionIndex,
    pub(super) model: Slot,
    pub(super) rank: SizeRank,
    pub(super) attempts: Attempts,
    pub(super) priority: Priority,
    /// When it came to this node's queue.
    pub(super) arrived: Timestamp,
}

/// Requests by the order in which the worker accepted them, in one line per size class, so that a
/// request whose model only fits the larger GPUs never holds up one that fits the others. One that
/// comes back from a lost GPU stands where it stood before.
#[derive(Debug)]
pub(super) struct Lines(Vec<BTreeMap<RequestKey, Waiting>>);

impl Lines {
    pub(super) fn new(ranks: usize) -> Self {
        Self(vec![BTreeMap::new(); ranks])
    }

    pub(super) fn insert(&mut self, request: Waiting) {
        self.0[request.rank.0].insert(request.key, request);
    }

    pub(super) fn remove(&mut self, request: &Waiting) {
        self.0[request.rank.0].remove(&request.key);
    }

    /// The first of each line, the oldest of them first.
    pub(super) fn fronts(&self, into: &mut Vec<Waiting>) {
        into.clear();
        into.extend(self.0.iter().filter_map(|line| Some(*line.first_key_value()?.1)));
        into.sort_unstable_by_key(|request| request.key);
    }
}
