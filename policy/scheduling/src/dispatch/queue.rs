//! Waiting requests, and their order by age.

use std::collections::BTreeMap;

use millrace_types::{Priority, Timestamp};

use super::models::ModelSlot;
use super::size_rank::SizeRank;
use millrace_core::attempts::AttemptRecord;
use millrace_core::ids::{FunctionIndex, RequestKey};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaitingRequest {
    pub(super) key: RequestKey,
    pub(super) function: FunctionIndex,
    pub(super) model: ModelSlot,
    pub(super) rank: SizeRank,
    pub(super) attempts: AttemptRecord,
    pub(super) priority: Priority,
    /// Time of arrival in this node's queue.
    pub(super) arrived: Timestamp,
}

/// Requests in the order in which the worker accepted them, in a line per size class: a request
/// for a model that only fits the larger GPUs never delays a request that fits the others. A
/// request that returns from a lost GPU gets its old position again.
#[derive(Debug)]
pub(super) struct SizeClassQueues(Vec<BTreeMap<RequestKey, WaitingRequest>>);

impl SizeClassQueues {
    pub(super) fn new(ranks: usize) -> Self {
        Self(vec![BTreeMap::new(); ranks])
    }

    pub(super) fn insert(&mut self, request: WaitingRequest) {
        self.0[request.rank.0].insert(request.key, request);
    }

    pub(super) fn remove(&mut self, request: &WaitingRequest) {
        self.0[request.rank.0].remove(&request.key);
    }

    /// Fills `into` with the first request of each line, the oldest of them first.
    pub(super) fn fronts(&self, into: &mut Vec<WaitingRequest>) {
        into.clear();
        into.extend(self.0.iter().filter_map(|line| Some(*line.first_key_value()?.1)));
        into.sort_unstable_by_key(|request| request.key);
    }
}
