//! What the dispatcher knows of each GPU: who is on it, which models it holds, and when it is
//! likely to be free.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, Incarnation, ModelId, Timestamp};

use super::queue::{SizeRank, Waiting};
use crate::ids::RequestKey;

/// A request on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) request: Waiting,
    pub(super) rank: SizeRank,
    /// When its turn began.
    pub(super) since: Timestamp,
    /// What bringing its model was expected to take.
    pub(super) swap: Duration,
    /// Whether it was asked back.
    pub(super) recalled: bool,
    /// Whether anybody still waits for it.
    pub(super) withdrawn: bool,
}

#[derive(Debug)]
pub(super) struct Gpu {
    /// Its executor, while it is up.
    pub(super) executor: Option<Incarnation>,
    pub(super) rank: SizeRank,
    pub(super) host_rate: BytesPerSec,
    pub(super) running: Option<Held>,
    /// Handed over ahead: each starts as soon as the one before it ends. At most
    /// [`AHEAD_MAX`](super::AHEAD_MAX).
    pub(super) ahead: VecDeque<Held>,
    /// The models on it or on their way to it, and their blocks.
    resident: BTreeMap<ModelId, u32>,
    resident_blocks: u64,
}

impl Gpu {
    pub(super) fn new(rank: SizeRank, host_rate: BytesPerSec) -> Self {
        Self {
            executor: None,
            rank,
            host_rate,
            running: None,
            ahead: VecDeque::new(),
            resident: BTreeMap::new(),
            resident_blocks: 0,
        }
    }

    pub(super) fn idle(&self) -> bool {
        self.executor.is_some() && self.running.is_none()
    }

    /// Whether it is at work and somebody may wait behind it. Nobody waits behind a suspect.
    pub(super) fn takes_ahead(&self) -> bool {
        let alone = |held: &Held| held.request.attempts.suspect();
        self.executor.is_some() && self.running.as_ref().is_some_and(|held| !alone(held))
    }

    /// The place, in [`Self::ahead`], of the last request that could be asked back.
    pub(super) fn askable(&self) -> Option<usize> {
        self.ahead.iter().rposition(|held| !held.recalled && !held.withdrawn)
    }

    /// Requests that were asked back and have not come yet.
    pub(super) fn asked(&self) -> usize {
        self.ahead.iter().filter(|held| held.recalled).count()
    }

    pub(super) fn holds(&self, model: ModelId) -> bool {
        self.resident.contains_key(&model)
    }

    pub(super) fn resident_blocks(&self) -> u64 {
        self.resident_blocks
    }

    pub(super) fn add_resident(&mut self, model: ModelId, blocks: u32) {
        if self.resident.insert(model, blocks).is_none() {
            self.resident_blocks += u64::from(blocks);
        }
    }

    pub(super) fn remove_resident(&mut self, model: ModelId) {
        if let Some(blocks) = self.resident.remove(&model) {
            self.resident_blocks -= u64::from(blocks);
        }
    }

    pub(super) fn clear_resident(&mut self) {
        self.resident.clear();
        self.resident_blocks = 0;
    }

    /// What bringing a model here would take, on a free link.
    pub(super) fn swap_time(&self, model: ModelId, weights: Bytes) -> Duration {
        if self.holds(model) { Duration::ZERO } else { self.host_rate.time_for(weights) }
    }

    /// The request of this key, where it is here.
    pub(super) fn held_mut(&mut self, key: RequestKey) -> Option<&mut Held> {
        self.running.as_mut().into_iter().chain(&mut self.ahead).find(|held| held.request.key == key)
    }

    /// Takes a request off; the next one's turn begins when the running one goes.
    pub(super) fn remove(&mut self, now: Timestamp, key: RequestKey) -> Option<Held> {
        if let Some(running) = self.running.take_if(|held| held.request.key == key) {
            self.running = self.ahead.pop_front().map(|held| Held { since: now, ..held });
            return Some(running);
        }
        let place = self.ahead.iter().position(|held| held.request.key == key)?;
        self.ahead.remove(place)
    }
}

/// When a GPU is likely to be through with what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Expected {
    /// Then.
    At(Timestamp),
    /// A model never ran, or what runs should have ended before now.
    Unknown,
}
