//! Consolidation carried out (T13, A.2): models that are not in use move to other blocks of their GPU,
//! so that partly used partitions become whole. Where it is due, and how much fragmentation it leaves,
//! [`memory`](crate::memory) says; the default layout has none.
//!
//! ```text
//! something changed ─► LOOK_AFTER ─► a step is due: Relocate ─► Relocated ─► the next, until none is
//!                           ▲                  │ MapFailed: the model is dropped, and comes from the
//!                           └──────────────────┘            host when it is asked for
//! ```
//! Nothing moves of a model that a request here waits for or runs, that is on its way here, or that
//! another GPU copies; no step begins while a request waits for room or weights are copied to the GPU.
//! A request for a model that moves waits until it has: at most one step ([`Config::step`]).
//!
//! [`Config::step`]: crate::memory::Config::step

use std::time::Duration;

use millrace_types::{ModelId, Timestamp};

use super::slots::Stage;
use super::{Action, Gpu};
use crate::ids::Generation;
use crate::memory::Relocated;

/// How long after a change it is looked whether consolidation is due: a plan costs as much as there are
/// models and partitions, and much changes again at once.
pub const LOOK_AFTER: Duration = Duration::from_secs(1);

impl Gpu {
    /// Begins a step of consolidation, if it is time and one is due.
    pub(super) fn consolidate(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if self.incarnation.is_none() || !self.relocating.is_empty() || !self.memory.is_untidy() {
            return;
        }
        match self.tidy_at {
            Some(at) if at <= now => {}
            Some(_) => return,
            None => {
                self.tidy_at = Some(now + LOOK_AFTER);
                return;
            }
        }
        self.tidy_at = Some(now + LOOK_AFTER);
        let waits = self.slots.iter().any(|slot| !matches!(slot.stage, Stage::Sent { .. }));
        if waits || !self.moving.is_empty() {
            return;
        }
        let in_use: Vec<_> = self.slots.iter().map(|slot| slot.model).collect();
        let moves = self.memory.consolidate(&in_use);
        if moves.is_empty() {
            if in_use.is_empty() && self.lent.is_empty() {
                self.memory.found_tidy();
                self.tidy_at = None;
            }
            return;
        }
        self.totals.moved_blocks += moves.iter().map(|step| u64::from(step.from.len)).sum::<u64>();
        for Relocated { model, was, generation } in self.memory.begin_moves(&moves) {
            let (Some(region), Some(shape)) = (self.memory.region(model), self.programs.shape(model)) else {
                continue;
            };
            let blocks = super::serve::first_blocks(region.runs(), shape.chunks);
            self.relocating.insert(model, now);
            actions.push(Action::Relocate { model, was, generation, blocks });
        }
    }

    pub(super) fn relocated(&mut self, now: Timestamp, model: ModelId, generation: Generation) {
        if self.memory.region(model).is_some_and(|region| region.generation() == generation) {
            self.end_move(model);
            if self.relocating.is_empty() && self.memory.is_untidy() {
                // The next step at once.
                self.tidy_at = Some(now);
            }
        }
    }

    /// Notes that a model does not move any more, before or after it has arrived.
    pub(super) fn end_move(&mut self, model: ModelId) {
        if self.relocating.remove(&model).is_some() {
            self.memory.end_moves(model);
        }
    }

    pub(super) fn is_relocating(&self, model: ModelId) -> bool {
        self.relocating.contains_key(&model)
    }
}
