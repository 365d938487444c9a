//! Intermediate data in the GPU's memory (FaaSTube §7). The [store](millrace_memory::elastic) decides which
//! data is on the GPU, and gets its blocks from the memory map that models use too.
//!
//! ```text
//! Event::Data ─► store ─► Allocate, Release ─► memory map ─► models evicted, as for a model
//!                  ▲   └► Place, Migrate, Reload, … ─► Action::Data, with the blocks on the GPU
//!                  └───── Limit: blocks that no model in use and no waiting request needs
//! ```
//!
//! The store is created for the first object, so a GPU with functions that pass no data keeps all
//! of its memory for models. The store ends with the executor; data that was only on this GPU is
//! lost.
//!
//! The room that a request waits for counts as used if that room fits beside the models in use, so
//! that data makes way. Free blocks are given back at once; data that no run reads is copied to the
//! host first.
//!
//! Data is kept on a GPU only under two conditions. Models must share an executor, because separate
//! processes would not see each other's data. And the memory layout must be able to give out any
//! free block, because memory that is given out in larger pieces, or fails by shape, cannot be
//! limited in blocks.

use std::collections::BTreeSet;

use millrace_types::{ModelId, Timestamp};

use super::data_store::GpuDataStore;
use super::gpu_core::GpuCore;
use super::isolation::ExecutorIsolation;
use super::object_action::ObjectAction;
use super::protocol::Action;
use super::slots::{AssignedRequest, RequestStage};
use millrace_core::Core as _;
use millrace_core::ids::ObjectKey;
use millrace_core::ids::RequestKey;
use millrace_memory::elastic::{self, ElasticStore, ObjectCounts, ObjectLocation, StoreExtent};
use millrace_memory::{BlockRun, EvictedModel, MemoryShortage};

impl GpuCore {
    /// Returns the store of intermediate data; `None` before the first object.
    #[must_use]
    pub fn store(&self) -> Option<&ElasticStore> {
        self.data.as_ref()?.store.as_ref()
    }

    /// Returns the counts of objects on this GPU, including those of lost executors.
    #[must_use]
    pub fn data_counts(&self) -> ObjectCounts {
        self.data.as_ref().map(GpuDataStore::counts).unwrap_or_default()
    }

    /// Returns the GPU blocks of an object; `None` if the object is not on this GPU.
    #[must_use]
    pub fn object_blocks(&self, object: ObjectKey) -> Option<Vec<BlockRun>> {
        let store = self.store()?;
        let there = matches!(store.place(object)?, ObjectLocation::Gpu | ObjectLocation::Migrating);
        if there { self.blocks(store.extents(object)) } else { None }
    }

    /// Whether outputs of runs may stay on this GPU.
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
            // The configuration was checked when the GPU was configured.
            data.store = if up { ElasticStore::new(data.config).ok() } else { None };
            if data.store.is_none() {
                actions.push(Action::Data(ObjectAction::Decline { object }));
            }
        }
        self.limit_data(now, actions);
        self.tell_store(now, event, actions);
    }

    /// Tells the store its limit, if the limit has changed.
    pub(super) fn limit_data(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(store) = self.store() else { return };
        let was = store.limit();
        let limit = self.memory.block().bytes(self.spare_blocks());
        if limit.min(self.data.as_ref().map_or(limit, |data| data.config.cap)) != was {
            self.tell_store(now, elastic::Event::Limit { limit }, actions);
        }
    }

    /// Returns the most urgent request that waits for room for a model, of the first such requests of
    /// all seats. Data that leaves makes room for this request, so the request's deadline is the deadline of the copy to the host.
    #[must_use]
    pub fn waits_for_room(&self) -> Option<RequestKey> {
        self.roomless().map(|slot| slot.key)
    }

    fn roomless(&self) -> Option<&AssignedRequest> {
        let waits = |slot: &&AssignedRequest| {
            slot.stage == RequestStage::Waiting && self.memory.region(slot.model).is_none()
        };
        self.lines.most_urgent(waits)
    }

    /// Returns the number of blocks that no model in use has and that no waiting request needs. A
    /// request that would not fit beside the models in use, even without any data, needs nothing of
    /// data yet: there may be enough room when a model in use becomes idle.
    fn spare_blocks(&self) -> u32 {
        let mut used: BTreeSet<ModelId> = self.in_use().into_iter().collect();
        used.extend(self.lent.values());
        let unused = self.memory.total_blocks().saturating_sub(self.memory.blocks_of(&used));
        let waiting = self.roomless().and_then(|slot| self.programs.shape(slot.model));
        waiting.and_then(|shape| unused.checked_sub(shape.blocks)).unwrap_or(unused)
    }

    /// Passes an event to the store, and carries out the store's actions on the memory map.
    pub(super) fn tell_store(&mut self, now: Timestamp, event: elastic::Event, actions: &mut Vec<Action>) {
        let mut events = vec![event];
        let mut wanted = Vec::new();
        while let Some(event) = events.pop() {
            let Some(store) = self.data.as_mut().and_then(|data| data.store.as_mut()) else { return };
            store.on_event(now, event, &mut wanted);
            for action in wanted.drain(..) {
                events.extend(self.carry_out_data(action, actions));
            }
        }
    }

    /// Carries out an action of the store; returns the event that reports its failure, if any.
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
                for block in data.blocks_of(&extents) {
                    if let Some(run) = data.backing.remove(&block) {
                        self.memory.give_back_block(run);
                    }
                }
                return None;
            }
            Wanted::Place { object, extents } => match self.blocks(&extents) {
                Some(blocks) => ObjectAction::Place { object, blocks },
                None => return Some(elastic::Event::CopyFailed { object }),
            },
            Wanted::Reload { object, extents } => match self.blocks(&extents) {
                Some(blocks) => ObjectAction::Reload { object, blocks },
                None => return Some(elastic::Event::CopyFailed { object }),
            },
            Wanted::Refuse { object } => ObjectAction::Refuse { object },
            Wanted::Decline { object } => ObjectAction::Decline { object },
            Wanted::Migrate { object } => ObjectAction::Migrate { object },
            Wanted::MigrationCompleted { object } => ObjectAction::Left { object },
            Wanted::CancelMigration { object } => ObjectAction::Keep { object },
            Wanted::Free { object } => ObjectAction::Free { object },
            Wanted::Lost { object } => ObjectAction::Lost { object },
        };
        actions.push(Action::Data(does));
        None
    }

    fn blocks(&self, extents: &[StoreExtent]) -> Option<Vec<BlockRun>> {
        self.data.as_ref()?.blocks(extents)
    }

    /// Maps GPU blocks under extents, evicting models that are not in use. The store's limit
    /// ensures that there are enough blocks. If there were none, the store's objects in these
    /// extents would be refused.
    fn back(&mut self, extents: &[StoreExtent], actions: &mut Vec<Action>) {
        let Some(data) = &self.data else { return };
        let places = data.blocks_of(extents);
        let count = u32::try_from(places.len()).unwrap_or(u32::MAX);
        // Models that requests wait for here are evicted last.
        let taken = match self.memory.take_blocks(count, &self.spared_models()) {
            Err(MemoryShortage::Pinned) => self.memory.take_blocks(count, &self.in_use()),
            taken => taken,
        };
        let Ok((runs, evicted)) = taken else { return };
        self.note_evicted(&evicted, actions);
        if let Some(data) = &mut self.data {
            data.backing.extend(places.into_iter().zip(runs));
        }
    }

    /// Reports evicted models to the executor and the node.
    pub(super) fn note_evicted(&mut self, evicted: &[EvictedModel], actions: &mut Vec<Action>) {
        self.totals.evictions += evicted.len() as u64;
        for &EvictedModel { model, generation } in evicted {
            self.prefetched.remove(&model);
            actions.push(Action::Unmap { model, generation });
            if self.isolation == ExecutorIsolation::Resident {
                self.unload(model, actions);
            }
        }
        // A model that a request here still needs is loaded again at that request's turn, so the
        // node still counts it as here.
        let gone = evicted.iter().map(|evicted| evicted.model).filter(|&model| !self.lines.uses(model));
        let gone: Vec<_> = gone.collect();
        if !gone.is_empty() {
            actions.push(Action::Evicted { models: gone });
        }
    }
}
