//! Digests of the state at every thousandth log entry, which members compare. Equal logs lead to
//! equal states, so the digests of an entry differ only if a member's state is corrupt.
//!
//! ```text
//!   apply ─ entry 3000 ─▶ clone ─▶ queue (4) ─▶ one blocking task ─▶ the last 8 digests ─▶ readers
//! ```
//!
//! Cloning a state costs a few reference counts, so applying entries never waits for a digest. If
//! entries arrive faster than states are hashed, the oldest waiting state is dropped. Members then
//! have fewer digests in common, and compare those.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_types::Digest;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::machine::StateMachine;

/// Log entries between two digests.
const DIGEST_EVERY: u64 = 1_000;
/// Number of the newest digests that are stored.
pub const DIGESTS_KEPT: usize = 8;
/// Maximum number of states in the queue. A waiting state keeps memory alive that later entries
/// replaced.
const WAITING_MAX: usize = 4;

/// The digest of the state after a log entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateDigest {
    pub index: u64,
    /// The SHA-256 of the encoded state.
    pub digest: Digest,
}

/// The newest digests, oldest first.
pub type RecentDigests = Arc<[StateDigest]>;

/// Computes digests of a machine's states.
pub(crate) struct Digests<M> {
    every: u64,
    recent: Arc<watch::Sender<RecentDigests>>,
    queue: Arc<Mutex<Queue<M>>>,
}

struct Queue<M> {
    waiting: VecDeque<(u64, M)>,
    /// Whether a task is hashing states of the queue.
    is_hashing: bool,
}

impl<M: StateMachine> Digests<M> {
    pub(crate) fn new() -> Self {
        let queue = Queue { waiting: VecDeque::new(), is_hashing: false };
        Self {
            every: DIGEST_EVERY,
            recent: Arc::new(watch::Sender::new(Arc::new([]))),
            queue: Arc::new(Mutex::new(queue)),
        }
    }

    pub(crate) fn recent(&self) -> watch::Receiver<RecentDigests> {
        self.recent.subscribe()
    }

    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn set_every(&mut self, entries: u64) {
        self.every = entries;
    }

    /// Queues the state after an entry for hashing if the entry's index is a multiple of `every`.
    /// Requires a tokio runtime.
    pub(crate) fn applied(&self, index: u64, state: &M) {
        if !index.is_multiple_of(self.every) {
            return;
        }
        let mut queue = lock(&self.queue);
        if queue.waiting.len() == WAITING_MAX {
            queue.waiting.pop_front();
        }
        queue.waiting.push_back((index, state.clone()));
        if !std::mem::replace(&mut queue.is_hashing, true) {
            let queue = Arc::clone(&self.queue);
            let recent = Arc::clone(&self.recent);
            tokio::task::spawn_blocking(move || hash_waiting(&queue, &recent));
        }
    }
}

fn hash_waiting<M: StateMachine>(queue: &Mutex<Queue<M>>, recent: &watch::Sender<RecentDigests>) {
    while let Some((index, state)) = next(queue) {
        let digest = state.digest();
        recent.send_modify(|recent| {
            let kept = recent.len().saturating_sub(DIGESTS_KEPT - 1);
            *recent = recent[kept..].iter().copied().chain([StateDigest { index, digest }]).collect();
        });
    }
}

fn next<M>(queue: &Mutex<Queue<M>>) -> Option<(u64, M)> {
    let mut queue = lock(queue);
    let next = queue.waiting.pop_front();
    queue.is_hashing = next.is_some();
    next
}

fn lock<M>(queue: &Mutex<Queue<M>>) -> MutexGuard<'_, Queue<M>> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}
