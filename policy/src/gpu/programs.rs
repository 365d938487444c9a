//! The models a GPU may be asked for, and which of them its executor knows.

use std::collections::BTreeMap;

use millrace_types::{Bytes, ModelId, Residency, Timestamp};

use super::eviction::Standing;
use crate::backoff::Backoff;
use crate::lifecycle::RESTARTS;
use crate::memory::blocks_for;

/// Programs an executor is given to know at one time: what it knows and has not been asked for
/// longest is unloaded first.
pub const PROGRAMS_MAX: usize = 512;

/// A model, as a GPU sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) weights: Bytes,
    /// Blocks to hold for it.
    pub(super) blocks: u32,
    /// Chunks its weights fill: at most `blocks`.
    pub(super) chunks: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// The executor was not told of it.
    No,
    /// It was told and has not said whether it could load it.
    Told,
    /// It has loaded it.
    Loaded,
}

#[derive(Debug)]
struct Program {
    shape: Shape,
    known: Known,
    /// As it was last told of.
    standing: Standing,
    residency: Residency,
    last_asked: Timestamp,
    /// Since when it has been loaded, if it is.
    since: Option<Timestamp>,
    /// Of a model whose process died.
    deaths: Option<Box<Deaths>>,
    /// No longer installed: goes as soon as nothing of it is on the GPU.
    removed: bool,
}

#[derive(Debug)]
struct Deaths {
    backoff: Backoff,
    /// When it may be loaded again.
    until: Timestamp,
}

#[derive(Debug, Default)]
pub(super) struct Programs {
    models: BTreeMap<ModelId, Program>,
    known: usize,
    removed: usize,
}

impl Programs {
    pub(super) fn install(&mut self, model: ModelId, memory: Bytes, weights: Bytes) {
        let shape = Shape { weights, blocks: blocks_for(memory.max(weights)), chunks: blocks_for(weights) };
        let (known, standing, last_asked) = (Known::No, Standing::default(), Timestamp::ZERO);
        let (residency, since, deaths) = (Residency::default(), None, None);
        let new = Program { shape, known, standing, residency, last_asked, since, deaths, removed: false };
        self.models.entry(model).or_insert(new);
    }

    pub(super) fn remove(&mut self, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model).filter(|program| !program.removed) {
            program.removed = true;
            self.removed += 1;
        }
    }

    pub(super) fn shape(&self, model: ModelId) -> Option<Shape> {
        Some(self.models.get(&model)?.shape)
    }

    pub(super) fn standing(&self, model: ModelId) -> Standing {
        self.models.get(&model).map_or_else(Standing::default, |program| program.standing)
    }

    pub(super) fn set_standing(&mut self, model: ModelId, standing: Standing) {
        if let Some(program) = self.models.get_mut(&model) {
            program.standing = standing;
        }
    }

    pub(super) fn residency(&self, model: ModelId) -> Residency {
        self.models.get(&model).map_or_else(Residency::default, |program| program.residency)
    }

    pub(super) fn set_residency(&mut self, model: ModelId, residency: Residency) {
        if let Some(program) = self.models.get_mut(&model) {
            program.residency = residency;
        }
    }

    pub(super) fn known(&self, model: ModelId) -> Known {
        self.models.get(&model).map_or(Known::No, |program| program.known)
    }

    /// Notes that the executor is told of a model.
    pub(super) fn tell(&mut self, now: Timestamp, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model) {
            program.last_asked = now;
            self.known += usize::from(program.known == Known::No);
            program.known = Known::Told;
        }
    }

    pub(super) fn asked(&mut self, now: Timestamp, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model) {
            program.last_asked = now;
        }
    }

    pub(super) fn loaded(&mut self, now: Timestamp, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model).filter(|program| program.known == Known::Told) {
            (program.known, program.since) = (Known::Loaded, Some(now));
        }
    }

    /// Notes that its process died, or none could be started.
    pub(super) fn died(&mut self, now: Timestamp, model: ModelId, seed: u64) {
        if let Some(program) = self.models.get_mut(&model) {
            let new = || Box::new(Deaths { backoff: Backoff::new(RESTARTS, seed), until: now });
            let deaths = program.deaths.get_or_insert_with(new);
            deaths.until = deaths.backoff.died(now, program.since);
        }
        self.forget(model);
    }

    /// When a model may be loaded, as far as the deaths of its processes go.
    pub(super) fn starts(&self, model: ModelId) -> Timestamp {
        let deaths = self.models.get(&model).and_then(|program| program.deaths.as_ref());
        deaths.map_or(Timestamp::ZERO, |deaths| deaths.until)
    }

    /// Notes that the executor does not know a model any more.
    pub(super) fn forget(&mut self, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model).filter(|program| program.known != Known::No) {
            (program.known, program.since) = (Known::No, None);
            self.known -= 1;
        }
    }

    /// Notes that the executor knows nothing.
    pub(super) fn forget_all(&mut self) {
        for program in self.models.values_mut() {
            (program.known, program.since, program.deaths) = (Known::No, None, None);
        }
        self.known = 0;
    }

    /// How many the executor, or executors, of the GPU know.
    pub(super) fn known_count(&self) -> usize {
        self.known
    }

    /// The program to unload before another may be loaded where `max` are enough, of those that
    /// `may_go`.
    pub(super) fn surplus(&self, max: usize, may_go: impl Fn(ModelId) -> bool) -> Option<ModelId> {
        if self.known < max {
            return None;
        }
        let idle =
            self.models.iter().filter(|&(&model, program)| program.known != Known::No && may_go(model));
        idle.min_by_key(|(_, program)| program.last_asked).map(|(&model, _)| model)
    }

    /// Models that were removed and are not `used`, each given once.
    pub(super) fn sweep(&mut self, used: impl Fn(ModelId) -> bool) -> Vec<(ModelId, Known)> {
        if self.removed == 0 {
            return Vec::new();
        }
        let gone = self.models.iter().filter(|&(&model, program)| program.removed && !used(model));
        let gone: Vec<_> = gone.map(|(&model, program)| (model, program.known)).collect();
        for &(model, known) in &gone {
            self.models.remove(&model);
            self.removed -= 1;
            self.known -= usize::from(known != Known::No);
        }
        gone
    }
}
