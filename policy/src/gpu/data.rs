//! Intermediate data in the GPU's memory (FaaSTube §7): the [store](crate::elastic) decides what is
//! here, and gets its blocks from the same map as the models.
//!
//! ```text
//! Event::Data ─► store ─► Allocate, Release ─► memory map ─► models evicted, as for a model
//!                  ▲   └► Place, Migrate, Reload, … ─► Action::Data, with the blocks on the GPU
//!                  └───── Limit: what models in use and those that wait for room leave
//! ```
//! The store begins with its first object: a GPU whose functions pass nothing keeps all of its memory
//! for models. It ends with the executor, and what was here alone is lost.
//!
//! What a request waits for room for counts as taken already, if it fits beside the models in use, so that
//! data makes way: what is free is given back at once, what no run reads is copied to the host first. Only where models share an
//! executor: a process of its own would not see what another's has; and where the memory's layout gives out
//! any free block, since what is given out in larger pieces, or fails by shape, cannot be limited in blocks.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{Bytes, ModelId, Timestamp};

use super::slots::Stage;
use super::{Action, Gpu};
use crate::core::Core as _;
use crate::decision_text::DecisionText;
use crate::elastic::{self, Counts, Extent, ObjectKey, Place, Store};
use crate::ids::RequestKey;
use crate::memory::{BLOCK, Evicted, Run as BlockRun, Shortage};

/// What becomes of an object on the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DataAction {
    /// Write it to these blocks, in this order, from where it was produced.
    Place {
        /// Which.
        object: ObjectKey,
        /// Where to.
        blocks: Vec<BlockRun>,
    },
    /// Copy it to the host, from where it was produced.
    Refuse {
        /// Which.
        object: ObjectKey,
    },
    /// It is not taken: copy it to the host, and say nothing of it any more.
    Decline {
        /// Which.
        object: ObjectKey,
    },
    /// Copy it to the host. It can be read here until then.
    Migrate {
        /// Which.
        object: ObjectKey,
    },
    /// It is on the host alone from now on, before its blocks are anybody else's.
    Left {
        /// Which.
        object: ObjectKey,
    },
    /// It stays: its copy on the host may go.
    Keep {
        /// Which.
        object: ObjectKey,
    },
    /// Copy it from the host to these blocks.
    Reload {
        /// Which.
        object: ObjectKey,
        /// Where to.
        blocks: Vec<BlockRun>,
    },
    /// Drop every copy.
    Free {
        /// Which.
        object: ObjectKey,
    },
    /// It is nowhere any more.
    Lost {
        /// Which.
        object: ObjectKey,
    },
}

impl DataAction {
    /// Describes the action as a decision of the canonical text.
    pub(super) fn decision(&self) -> Option<DecisionText> {
        let (name, object) = match self {
            Self::Place { object, .. } => ("keep on the GPU", object),
            Self::Refuse { object } | Self::Decline { object } => ("keep on the host", object),
            Self::Migrate { object } => ("migrate", object),
            Self::Reload { object, .. } => ("reload", object),
            Self::Free { object } => ("free", object),
            Self::Left { .. } | Self::Keep { .. } | Self::Lost { .. } => return None,
        };
        Some(DecisionText::new(name).object(*object))
    }
}

/// The data on a GPU.
#[derive(Debug)]
pub(super) struct Data {
    config: elastic::Config,
    store: Option<Store>,
    /// Where the store's blocks are in the GPU's memory.
    backing: BTreeMap<u64, BlockRun>,
    /// What stores that are gone had counted.
    before: Counts,
}

impl Data {
    pub(super) fn new(config: elastic::Config) -> Self {
        // As the store rounds it.
        let config = elastic::Config { cap: Bytes(config.cap.0 / BLOCK.0 * BLOCK.0), ..config };
        Self { config, store: None, backing: BTreeMap::new(), before: Counts::default() }
    }

    /// Everything is gone, with the memory it was in.
    pub(super) fn clear(&mut self) {
        self.before = self.counts();
        (self.store, self.backing) = (None, BTreeMap::new());
    }

    fn counts(&self) -> Counts {
        let now = self.store.as_ref().map(Store::counts).unwrap_or_default();
        Counts {
            migrated: self.before.migrated + now.migrated,
            reloaded: self.before.reloaded + now.reloaded,
            refused: self.before.refused + now.refused,
            host_reads: self.before.host_reads + now.host_reads,
        }
    }

    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        self.store.as_ref()?.next_wake()
    }

    /// Where extents are in the GPU's memory; `None` where not all of them are.
    fn blocks(&self, extents: &[Extent]) -> Option<Vec<BlockRun>> {
        let mut runs: Vec<BlockRun> = Vec::new();
        for block in extents.iter().flat_map(blocks_of) {
            let BlockRun { start, .. } = *self.backing.get(&block)?;
            match runs.last_mut() {
                Some(last) if last.end() == start => last.len += 1,
                _ => runs.push(BlockRun { start, len: 1 }),
            }
        }
        Some(runs)
    }
}

/// The blocks of the store's range that an extent covers; stores of blocks have no others.
fn blocks_of(extent: &Extent) -> impl Iterator<Item = u64> + use<> {
    extent.at / BLOCK.0..(extent.at + extent.len.0).div_ceil(BLOCK.0)
}

impl Gpu {
    /// What is of intermediate data here; `None` before there was any.
    #[must_use]
    pub fn store(&self) -> Option<&Store> {
        self.data.as_ref()?.store.as_ref()
    }

    /// What became of objects here, those of executors that are gone included.
    #[must_use]
    pub fn data_counts(&self) -> Counts {
        self.data.as_ref().map(Data::counts).unwrap_or_default()
    }

    /// Where an object lies in the GPU's memory; `None` where it is not there.
    #[must_use]
    pub fn object_blocks(&self, object: ObjectKey) -> Option<Vec<BlockRun>> {
        let store = self.store()?;
        let there = matches!(store.place(object)?, Place::Gpu | Place::Migrating);
        if there { self.blocks(store.extents(object)) } else { None }
    }

    /// Whether outputs may stay here.
    #[must_use]
    pub fn keeps_data(&self) -> bool {
        self.data.is_some() && self.incarnation.is_some()
    }

    pub(super) fn on_data(&mut self, now: Timestamp, event: elastic::Event, actions: &mut Vec<Action>) {
        let up = self.incarnation.is_some();
        if let Some(data) = &mut self.data
            && let elastic::Event::Store { object, .. } = event
            && data.store.is_none()
        {
            // Checked when it was configured.
            data.store = if up { Store::new(data.config).ok() } else { None };
            if data.store.is_none() {
                actions.push(Action::Data(DataAction::Decline { object }));
            }
        }
        self.limit_data(now, actions);
        self.tell_store(now, event, actions);
    }

    /// Tells the store what it may have, if that has changed.
    pub(super) fn limit_data(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(store) = self.store() else { return };
        let was = store.limit();
        let limit = Bytes(BLOCK.0 * u64::from(self.spare_blocks()));
        if limit.min(self.data.as_ref().map_or(limit, |data| data.config.cap)) != was {
            self.tell_store(now, elastic::Event::Limit { limit }, actions);
        }
    }

    /// The request whose model has no room yet: what leaves makes it for this one, and by when it has to
    /// have left is this one's to say.
    #[must_use]
    pub fn waits_for_room(&self) -> Option<RequestKey> {
        self.roomless().map(|slot| slot.key)
    }

    fn roomless(&self) -> Option<&super::Slot> {
        let waits =
            |slot: &&super::Slot| slot.stage == Stage::Waiting && self.memory.region(slot.model).is_none();
        self.slots.iter().find(waits)
    }

    /// Blocks that no model in use has, and none that waits for room needs. One that has none beside those
    /// in use, whatever leaves, needs nothing of data yet: when one of them ends there may be enough.
    fn spare_blocks(&self) -> u32 {
        let mut used: BTreeSet<ModelId> = self.in_use().into_iter().collect();
        used.extend(self.lent.values());
        let unused = self.memory.total_blocks().saturating_sub(self.memory.blocks_of(&used));
        let waiting = self.roomless().and_then(|slot| self.programs.shape(slot.model));
        waiting.and_then(|shape| unused.checked_sub(shape.blocks)).unwrap_or(unused)
    }

    /// Lets the store handle an event, and what it wants of the memory map be done.
    pub(super) fn tell_store(&mut self, now: Timestamp, event: elastic::Event, actions: &mut Vec<Action>) {
        let (mut events, mut wanted) = (vec![event], Vec::new());
        while let Some(event) = events.pop() {
            let Some(store) = self.data.as_mut().and_then(|data| data.store.as_mut()) else { return };
            store.on_event(now, event, &mut wanted);
            for action in wanted.drain(..) {
                events.extend(self.carry_out_data(action, actions));
            }
        }
    }

    /// Does what the store wants; returns what it has to be told of that.
    fn carry_out_data(
        &mut self,
        action: elastic::Action,
        actions: &mut Vec<Action>,
    ) -> Option<elastic::Event> {
        use elastic::Action as Wanted;
        let does = match action {
            Wanted::Allocate { extents } => {
                self.back(&extents, actions);
                return None;
            }
            Wanted::Release { extents } => {
                let Some(data) = &mut self.data else { return None };
                for run in extents.iter().flat_map(blocks_of).filter_map(|block| data.backing.remove(&block))
                {
                    self.memory.give_back_block(run);
                }
                return None;
            }
            Wanted::Place { object, extents } => match self.blocks(&extents) {
                Some(blocks) => DataAction::Place { object, blocks },
                None => return Some(elastic::Event::CopyFailed { object }),
            },
            Wanted::Reload { object, extents } => match self.blocks(&extents) {
                Some(blocks) => DataAction::Reload { object, blocks },
                None => return Some(elastic::Event::CopyFailed { object }),
            },
            Wanted::Refuse { object } => DataAction::Refuse { object },
            Wanted::Decline { object } => DataAction::Decline { object },
            Wanted::Migrate { object } => DataAction::Migrate { object },
            Wanted::Left { object } => DataAction::Left { object },
            Wanted::Keep { object } => DataAction::Keep { object },
            Wanted::Free { object } => DataAction::Free { object },
            Wanted::Lost { object } => DataAction::Lost { object },
        };
        actions.push(Action::Data(does));
        None
    }

    fn blocks(&self, extents: &[Extent]) -> Option<Vec<BlockRun>> {
        self.data.as_ref()?.blocks(extents)
    }

    /// Puts blocks under extents, evicting models that are not in use. The limit sees to it that there are
    /// some; were there none, what is to be placed there would be refused.
    fn back(&mut self, extents: &[Extent], actions: &mut Vec<Action>) {
        let places: Vec<_> = extents.iter().flat_map(blocks_of).collect();
        let count = u32::try_from(places.len()).unwrap_or(u32::MAX);
        // What requests wait for here goes last.
        let taken = match self.memory.take_blocks(count, &self.waited_for()) {
            Err(Shortage::Pinned) => self.memory.take_blocks(count, &self.in_use()),
            taken => taken,
        };
        let Ok((runs, evicted)) = taken else { return };
        self.note_evicted(&evicted, actions);
        if let Some(data) = &mut self.data {
            data.backing.extend(places.into_iter().zip(runs));
        }
    }

    /// Tells the executor and the node of models that made room.
    pub(super) fn note_evicted(&mut self, evicted: &[Evicted], actions: &mut Vec<Action>) {
        self.totals.evictions += evicted.len() as u64;
        for &Evicted { model, generation } in evicted {
            self.prefetched.remove(&model);
            actions.push(Action::Unmap { model, generation });
            if self.isolation == super::Isolation::Resident {
                self.unload(model, actions);
            }
        }
        // What a request here still needs comes back at its turn.
        let gone = evicted.iter().map(|evicted| evicted.model).filter(|&model| !self.slots.uses(model));
        let gone: Vec<_> = gone.collect();
        if !gone.is_empty() {
            actions.push(Action::Evicted { models: gone });
        }
    }
}
