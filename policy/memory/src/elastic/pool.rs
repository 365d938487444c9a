//! Memory pool of the store: which of the GPU's memory stays allocated, and the cost of changing
//! that.
//!
//! | [`PoolPolicy`] | keeps | cost of an object | gives back |
//! |---|---|---|---|
//! | `elastic` | the target, or the memory in use if that is more | nothing within the target; beyond it a native allocation | free memory beyond the target, at once |
//! | `caching` | all memory ever needed, in segments as `PyTorch`'s | a native allocation if no free piece is long enough | all free segments, at each period or at the limit |
//! | `gmlake` | all memory ever needed, in blocks | a native allocation if too few are free; one IPC operation for each block whenever the object is handed to a function | nothing |
//! | `none` | the memory in use | a native allocation and a release | each object's memory, at once |
//!
//! Each native call ("millisecond-level", §7.1) counts once: blocks that are backed together need
//! one call. Callers that price the calls can use the paper's 19% of latency (`none`) and 45 ms
//! (`gmlake`). The elastic pool's blocks are shared once, as a transfer buffer (§8), so an object
//! costs no IPC.
//!
//! The limit binds every policy: on a lower limit, every pool gives free memory back.

use millrace_types::{Bytes, Timestamp};

use super::blocks::Blocks;
use super::config::PoolPolicy;
use super::protocol::{Action, StoreExtent};
use super::segments::{self, Segments};
use crate::BlockSize;

/// Cumulative native calls of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeCalls {
    /// Allocations that an object waited for.
    pub allocations: u64,
    /// Allocations that no object waited for.
    pub ahead: u64,
    pub releases: u64,
    /// IPC operations: each block that a function maps costs one.
    pub ipc: u64,
}

impl NativeCalls {
    fn allocated(
        &mut self,
        extents: Vec<StoreExtent>,
        purpose: AllocationPurpose,
        actions: &mut Vec<Action>,
    ) {
        match purpose {
            AllocationPurpose::Object => self.allocations += 1,
            AllocationPurpose::Ahead => self.ahead += 1,
        }
        actions.push(Action::Allocate { extents });
    }

    fn released(&mut self, extents: Vec<StoreExtent>, actions: &mut Vec<Action>) {
        if !extents.is_empty() {
            self.releases += 1;
            actions.push(Action::Release { extents });
        }
    }

    /// Counts one release for each segment, because each segment is an allocation of its own.
    fn released_each(&mut self, segments: Vec<StoreExtent>, actions: &mut Vec<Action>) {
        segments.into_iter().for_each(|segment| self.released(vec![segment], actions));
    }
}

/// Reason for an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocationPurpose {
    /// An object waits for the memory.
    Object,
    /// No object waits: the pool grows ahead of demand.
    Ahead,
}

#[derive(Debug)]
enum PoolMemory {
    Blocks(Blocks),
    Segments(Segments),
}

#[derive(Debug)]
pub struct MemoryPool {
    policy: PoolPolicy,
    cap: Bytes,
    block: BlockSize,
    books: PoolMemory,
    used: Bytes,
    calls: NativeCalls,
    next_reclaim: Option<Timestamp>,
}

impl MemoryPool {
    /// Returns an empty pool of at most `cap`, a multiple of the block size. All memory is allocated
    /// and released in whole blocks.
    #[must_use]
    pub fn new(policy: PoolPolicy, cap: Bytes, block: BlockSize) -> Self {
        let books = match policy {
            PoolPolicy::Caching { .. } => PoolMemory::Segments(Segments::new(block)),
            PoolPolicy::Elastic | PoolPolicy::GmLake | PoolPolicy::Unpooled => {
                PoolMemory::Blocks(Blocks::new(block, block.blocks_in(cap)))
            }
        };
        let calls = NativeCalls::default();
        Self { policy, cap, block, books, used: Bytes::ZERO, calls, next_reclaim: None }
    }

    /// Returns the allocated memory.
    #[must_use]
    pub fn size(&self) -> Bytes {
        match &self.books {
            PoolMemory::Blocks(blocks) => self.block.bytes(blocks.backed()),
            PoolMemory::Segments(segments) => segments.size(),
        }
    }

    /// Returns the allocated memory that objects use. The rest is free.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.used
    }

    /// Returns the cumulative native calls.
    #[must_use]
    pub fn calls(&self) -> NativeCalls {
        self.calls
    }

    /// Returns the least memory that an object of this size needs.
    #[must_use]
    pub fn takes(&self, size: Bytes) -> Bytes {
        match &self.books {
            PoolMemory::Blocks(_) => self.block.round_up(size).max(self.block.get()),
            PoolMemory::Segments(_) => segments::rounded(size),
        }
    }

    /// Reserves memory for an object within `limit`. Returns `None`, and reserves nothing, if there
    /// is no such room.
    pub fn take(
        &mut self,
        size: Bytes,
        limit: Bytes,
        purpose: AllocationPurpose,
        actions: &mut Vec<Action>,
    ) -> Option<Vec<StoreExtent>> {
        let limit = limit.min(self.cap);
        let room = limit.saturating_sub(self.used);
        if self.takes(size) > room {
            return None;
        }
        let extents = match &mut self.books {
            PoolMemory::Blocks(blocks) => {
                let wanted = self.block.blocks_for(size).max(1);
                let short = wanted.saturating_sub(blocks.free());
                if short > 0 {
                    self.calls.allocated(blocks.grow(short), purpose, actions);
                }
                blocks.take(wanted)
            }
            PoolMemory::Segments(segments) => {
                if let Some(segment) = segments.short(size) {
                    let fits = |segments: &Segments| segment <= limit.saturating_sub(segments.size());
                    if !fits(segments) {
                        self.calls.released_each(segments.shrink(Bytes::ZERO), actions);
                    }
                    if !fits(segments) {
                        return None;
                    }
                    self.calls.allocated(vec![segments.grow(size)], purpose, actions);
                }
                vec![segments.take(size, room)?]
            }
        };
        self.used += held(&extents);
        Some(extents)
    }

    /// Takes back the memory of an object.
    pub fn give_back(&mut self, extents: &[StoreExtent], actions: &mut Vec<Action>) {
        self.used = self.used - held(extents);
        match &mut self.books {
            PoolMemory::Blocks(blocks) => {
                blocks.give_back(extents);
                if self.policy == PoolPolicy::Unpooled {
                    self.calls.released(blocks.shrink(blocks.free()), actions);
                }
            }
            PoolMemory::Segments(segments) => extents.iter().for_each(|&extent| segments.give_back(extent)),
        }
    }

    /// Counts the IPC operations of a function that maps an object's memory.
    pub fn mapped(&mut self, extents: &[StoreExtent]) {
        if self.policy == PoolPolicy::GmLake {
            self.calls.ipc += u64::from(self.block.blocks_in(held(extents)));
        }
    }

    /// Resizes an elastic pool to the target, and any other pool only within `limit`. Objects keep
    /// their memory.
    pub fn follow(&mut self, target: Bytes, limit: Bytes, actions: &mut Vec<Action>) {
        let limit = limit.min(self.cap);
        let elastic = self.policy == PoolPolicy::Elastic;
        let wanted = if elastic { target } else { self.size() };
        let goal = wanted.min(limit).max(self.used);
        match &mut self.books {
            PoolMemory::Blocks(blocks) => {
                let goal = self.block.blocks_for(goal);
                let backed = blocks.backed();
                if backed < goal {
                    self.calls.allocated(blocks.grow(goal - backed), AllocationPurpose::Ahead, actions);
                } else {
                    self.calls.released(blocks.shrink(backed - goal), actions);
                }
            }
            PoolMemory::Segments(segments) => self.calls.released_each(segments.shrink(goal), actions),
        }
    }

    /// Releases all free segments at the end of a period, if the policy has periods.
    pub fn reclaim(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let PoolPolicy::Caching { reclaim_every: Some(every) } = self.policy else { return };
        let due = *self.next_reclaim.get_or_insert(now + every);
        if now >= due {
            self.next_reclaim = Some(now + every);
            if let PoolMemory::Segments(segments) = &mut self.books {
                self.calls.released_each(segments.shrink(Bytes::ZERO), actions);
            }
        }
    }

    /// Returns the end of the current period.
    #[must_use]
    pub fn next_reclaim(&self) -> Option<Timestamp> {
        self.next_reclaim
    }
}

/// Returns the total length of extents.
pub(super) fn held(extents: &[StoreExtent]) -> Bytes {
    extents.iter().map(|extent| extent.len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: Bytes = Bytes::mib(40);

    /// Takes and gives back an object of each size in MiB, in turn.
    fn one_by_one(policy: PoolPolicy, sizes: &[u64]) -> (Bytes, NativeCalls) {
        let mut pool = MemoryPool::new(policy, CAP, BlockSize::DEFAULT);
        for &size in sizes {
            let extents =
                pool.take(Bytes::mib(size), CAP, AllocationPurpose::Object, &mut Vec::new()).unwrap();
            pool.mapped(&extents);
            pool.give_back(&extents, &mut Vec::new());
            pool.follow(Bytes::mib(8), CAP, &mut Vec::new());
        }
        (pool.size(), pool.calls())
    }

    #[test]
    fn pool_policies_differ_in_kept_memory_and_native_calls() {
        let sizes = [12, 12, 14, 6];
        let calls = |allocations, ahead, releases, ipc| NativeCalls { allocations, ahead, releases, ipc };
        // The first two objects need 12 MiB each, and the target keeps 8. The third needs 14, and
        // the last fits.
        assert_eq!(one_by_one(PoolPolicy::Elastic, &sizes), (Bytes::mib(8), calls(3, 0, 3, 0)));
        assert_eq!(one_by_one(PoolPolicy::GmLake, &sizes), (Bytes::mib(14), calls(2, 0, 0, 22)));
        assert_eq!(one_by_one(PoolPolicy::Unpooled, &sizes), (Bytes::ZERO, calls(4, 0, 4, 0)));
        // The pool has segments of 12 and 14 MiB. The last object is cut from the shorter.
        let caching = PoolPolicy::Caching { reclaim_every: None };
        assert_eq!(one_by_one(caching, &sizes), (Bytes::mib(26), calls(2, 0, 0, 0)));
    }

    #[test]
    fn a_caching_pool_gives_free_segments_back_before_it_refuses() {
        let mut pool = MemoryPool::new(PoolPolicy::Caching { reclaim_every: None }, CAP, BlockSize::DEFAULT);
        let mut actions = Vec::new();
        let one = pool.take(Bytes::mib(16), CAP, AllocationPurpose::Object, &mut actions).unwrap();
        let two = pool.take(Bytes::mib(16), CAP, AllocationPurpose::Object, &mut actions).unwrap();
        pool.give_back(&one, &mut actions);
        assert_eq!(pool.take(Bytes::mib(26), CAP, AllocationPurpose::Object, &mut actions), None);
        actions.clear();
        assert!(pool.take(Bytes::mib(24), CAP, AllocationPurpose::Object, &mut actions).is_some());
        pool.give_back(&two, &mut actions);
        assert_eq!((pool.size(), pool.used()), (Bytes::mib(40), Bytes::mib(24)));
        assert!(
            matches!(actions[..], [Action::Release { .. }, Action::Allocate { .. }]),
            "the first segment makes room: {actions:?}"
        );
    }

    #[test]
    fn a_caching_pool_reclaims_once_a_period() {
        let every = std::time::Duration::from_secs(60);
        let mut pool =
            MemoryPool::new(PoolPolicy::Caching { reclaim_every: Some(every) }, CAP, BlockSize::DEFAULT);
        let at = |secs: u64| Timestamp(secs * 1_000_000_000);
        pool.reclaim(at(5), &mut Vec::new());
        assert_eq!(pool.next_reclaim(), Some(at(65)));
        let extents = pool.take(Bytes::mib(16), CAP, AllocationPurpose::Object, &mut Vec::new()).unwrap();
        pool.take(Bytes::mib(18), CAP, AllocationPurpose::Object, &mut Vec::new()).unwrap();
        pool.give_back(&extents, &mut Vec::new());
        pool.reclaim(at(64), &mut Vec::new());
        assert_eq!(pool.size(), Bytes::mib(34));
        pool.reclaim(at(65), &mut Vec::new());
        assert_eq!((pool.size(), pool.next_reclaim()), (Bytes::mib(18), Some(at(125))));
    }

    #[test]
    fn every_pool_gives_free_memory_back_when_the_limit_falls_and_takes_no_more() {
        for (name, policy) in super::super::config::POOLS {
            let mut pool = MemoryPool::new(policy, CAP, BlockSize::DEFAULT);
            let sizes = [14, 14].map(Bytes::mib);
            let taken =
                sizes.map(|size| pool.take(size, CAP, AllocationPurpose::Object, &mut Vec::new()).unwrap());
            pool.give_back(&taken[1], &mut Vec::new());
            pool.follow(CAP, Bytes::mib(6), &mut Vec::new());
            assert_eq!((pool.size(), pool.used()), (Bytes::mib(14), Bytes::mib(14)), "{name}");
            let more = pool.take(Bytes::mib(1), Bytes::mib(14), AllocationPurpose::Object, &mut Vec::new());
            assert_eq!(more, None, "{name}");
        }
    }
}
