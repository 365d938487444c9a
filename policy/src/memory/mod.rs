//! A GPU's memory map: which model holds which blocks, what of it has arrived, and who is evicted
//! to make room. The only authority about the GPU's memory.
//!
//! Eviction never copies back: the host copy stays authoritative, so dropping the GPU copy is all
//! there is to it (T10). Victims are taken least recently used first, never one that is pinned.

mod allocator;
mod chunks;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use millrace_types::{Bytes, ModelId, Timestamp};

pub use allocator::{Allocator, Run};
pub use chunks::ChunkSet;

use crate::ids::Generation;

/// A block: the unit of GPU memory, and the chunk in which weights travel (D12, T09).
pub const BLOCK: Bytes = Bytes::mib(2);

/// How many blocks hold `size`.
#[must_use]
pub fn blocks_for(size: Bytes) -> u32 {
    u32::try_from(size.0.div_ceil(BLOCK.0)).unwrap_or(u32::MAX)
}

/// One model's place on the GPU.
#[derive(Debug)]
pub struct Region {
    generation: Generation,
    runs: Vec<Run>,
    blocks: u32,
    loaded: ChunkSet,
    last_used: Timestamp,
}

impl Region {
    /// The mapping it stands for.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Its blocks, in address order.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// How many there are.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// What of the weights has arrived.
    #[must_use]
    pub fn loaded(&self) -> &ChunkSet {
        &self.loaded
    }

    /// When it was used last.
    #[must_use]
    pub fn last_used(&self) -> Timestamp {
        self.last_used
    }
}

/// A model that was evicted, and the mapping that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Evicted {
    /// Which model.
    pub model: ModelId,
    /// Which mapping of it.
    pub generation: Generation,
}

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// What would make room is pinned: wait for it.
    #[error("what would make room is in use")]
    Pinned,
    /// Even an empty GPU has less.
    #[error("the GPU is too small")]
    TooLarge,
}

/// Which model holds what.
#[derive(Debug)]
pub struct MemoryMap {
    allocator: Allocator,
    regions: BTreeMap<ModelId, Region>,
    by_last_use: BTreeSet<(Timestamp, ModelId)>,
    last_generation: Generation,
}

impl MemoryMap {
    /// An empty GPU of this much memory. What does not fill a block is left out.
    #[must_use]
    pub fn new(memory: Bytes) -> Self {
        Self {
            allocator: Allocator::new(u32::try_from(memory.0 / BLOCK.0).unwrap_or(u32::MAX)),
            regions: BTreeMap::new(),
            by_last_use: BTreeSet::new(),
            last_generation: Generation(0),
        }
    }

    /// Blocks in all.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.allocator.total()
    }

    /// Blocks taken.
    #[must_use]
    pub fn used_blocks(&self) -> u32 {
        self.allocator.total() - self.allocator.free_blocks()
    }

    /// A model's region, if it has one.
    #[must_use]
    pub fn region(&self, model: ModelId) -> Option<&Region> {
        self.regions.get(&model)
    }

    /// Every region, in model order.
    pub fn regions(&self) -> impl Iterator<Item = (ModelId, &Region)> {
        self.regions.iter().map(|(&model, region)| (model, region))
    }

    /// Gives a model that has none a region of `blocks` blocks, of which `chunks` will be filled,
    /// evicting what is least recently used and not in `pinned` until there is room. On a shortage
    /// nothing is evicted.
    ///
    /// # Errors
    /// [`Shortage`].
    ///
    /// # Panics
    /// When the model has a region: a bug of the caller.
    pub fn map(
        &mut self,
        now: Timestamp,
        model: ModelId,
        blocks: u32,
        chunks: u32,
        pinned: &[ModelId],
    ) -> Result<Vec<Evicted>, Shortage> {
        assert!(!self.regions.contains_key(&model), "model {model} is mapped already");
        let evicted = self.make_room(blocks, pinned)?;
        let runs = self.allocator.take(blocks).expect("room was made");
        self.last_generation = Generation(self.last_generation.0 + 1);
        let generation = self.last_generation;
        let region = Region { generation, runs, blocks, loaded: ChunkSet::empty(chunks), last_used: now };
        self.regions.insert(model, region);
        self.by_last_use.insert((now, model));
        Ok(evicted)
    }

    fn make_room(&mut self, blocks: u32, pinned: &[ModelId]) -> Result<Vec<Evicted>, Shortage> {
        if blocks > self.total_blocks() {
            return Err(Shortage::TooLarge);
        }
        if blocks <= self.allocator.free_blocks() {
            return Ok(Vec::new());
        }
        if blocks > self.total_blocks() - self.blocks_of(pinned) {
            return Err(Shortage::Pinned);
        }
        let mut room = self.allocator.free_blocks();
        let mut victims = Vec::new();
        for &(_, model) in self.by_last_use.iter().filter(|(_, model)| !pinned.contains(model)) {
            if room >= blocks {
                break;
            }
            room += self.regions[&model].blocks;
            victims.push(model);
        }
        Ok(victims.into_iter().filter_map(|model| self.unmap(model)).collect())
    }

    /// What these models hold together; one that is named twice counts once.
    fn blocks_of(&self, models: &[ModelId]) -> u32 {
        let first = |&(place, model): &(usize, &ModelId)| !models[..place].contains(model);
        let regions =
            models.iter().enumerate().filter(first).filter_map(|(_, model)| self.regions.get(model));
        regions.map(Region::blocks).sum()
    }

    /// Drops a model's region, if it has one.
    pub fn unmap(&mut self, model: ModelId) -> Option<Evicted> {
        let region = self.regions.remove(&model)?;
        self.by_last_use.remove(&(region.last_used, model));
        self.allocator.give_back(&region.runs);
        Some(Evicted { model, generation: region.generation })
    }

    /// Notes that a model is used.
    pub fn touch(&mut self, now: Timestamp, model: ModelId) {
        if let Some(region) = self.regions.get_mut(&model) {
            self.by_last_use.remove(&(region.last_used, model));
            region.last_used = now;
            self.by_last_use.insert((now, model));
        }
    }

    /// Notes that chunks of a model's weights have arrived.
    pub fn arrived(&mut self, model: ModelId, chunks: Range<u32>) {
        if let Some(region) = self.regions.get_mut(&model) {
            region.loaded.insert(chunks);
        }
    }

    /// Forgets everything: the device's contents are lost. Generations go on counting.
    pub fn clear(&mut self) {
        self.allocator = Allocator::new(self.allocator.total());
        self.regions.clear();
        self.by_last_use.clear();
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
