//! The models that a GPU may be asked for, and whether the executor has loaded each model.

use std::collections::BTreeMap;

use millrace_types::{Bytes, ModelId, ResidencyOptions, Timestamp};

use crate::lifecycle::RESTARTS;
use millrace_core::backoff::Backoff;
use millrace_memory::eviction::EvictionCandidate;
use millrace_memory::{BlockSize, chunks_for};

/// Programs that an executor holds at a time, at most. The idle program with the oldest last
/// request is unloaded first.
pub const PROGRAMS_MAX: usize = 512;

/// The memory needs of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModelFootprint {
    pub(super) weights: Bytes,
    /// Blocks of GPU memory that the model needs.
    pub(super) blocks: u32,
    /// Blocks that the weights fill: at most `blocks`.
    pub(super) weight_blocks: u32,
    /// Chunks in which the weights arrive.
    pub(super) chunks: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgramLoadState {
    /// The executor was not told to load the model.
    No,
    /// The executor was told to load the model, and has not reported the outcome.
    Told,
    /// The executor has loaded the model.
    Loaded,
}

#[derive(Debug)]
struct Program {
    shape: ModelFootprint,
    known: ProgramLoadState,
    /// The last candidate that the node reported.
    candidate: EvictionCandidate,
    residency: ResidencyOptions,
    last_asked: Timestamp,
    /// Time of the load; `None` if the model is not loaded.
    since: Option<Timestamp>,
    /// The deaths of the model's processes; `None` if none died.
    deaths: Option<Box<ProcessBackoff>>,
    /// Whether the model was removed. The entry is dropped as soon as nothing of the model is on
    /// the GPU.
    removed: bool,
}

#[derive(Debug)]
struct ProcessBackoff {
    backoff: Backoff,
    /// The time from which the model may be loaded again.
    until: Timestamp,
}

#[derive(Debug, Default)]
pub(super) struct ProgramTable {
    models: BTreeMap<ModelId, Program>,
    known: usize,
    removed: usize,
}

impl ProgramTable {
    pub(super) fn install(&mut self, model: ModelId, memory: Bytes, weights: Bytes, block: BlockSize) {
        let shape = ModelFootprint {
            weights,
            blocks: block.blocks_for(memory.max(weights)),
            weight_blocks: block.blocks_for(weights),
            chunks: chunks_for(weights),
        };
        let new = Program {
            shape,
            known: ProgramLoadState::No,
            candidate: EvictionCandidate::default(),
            residency: ResidencyOptions::default(),
            last_asked: Timestamp::ZERO,
            since: None,
            deaths: None,
            removed: false,
        };
        self.models.entry(model).or_insert(new);
    }

    pub(super) fn remove(&mut self, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model).filter(|program| !program.removed) {
            program.removed = true;
            self.removed += 1;
        }
    }

    pub(super) fn shape(&self, model: ModelId) -> Option<ModelFootprint> {
        Some(self.models.get(&model)?.shape)
    }

    pub(super) fn candidate(&self, model: ModelId) -> EvictionCandidate {
        self.models.get(&model).map_or_else(EvictionCandidate::default, |program| program.candidate)
    }

    pub(super) fn set_candidate(&mut self, model: ModelId, candidate: EvictionCandidate) {
        if let Some(program) = self.models.get_mut(&model) {
            program.candidate = candidate;
        }
    }

    pub(super) fn residency(&self, model: ModelId) -> ResidencyOptions {
        self.models.get(&model).map_or_else(ResidencyOptions::default, |program| program.residency)
    }

    pub(super) fn set_residency(&mut self, model: ModelId, residency: ResidencyOptions) {
        if let Some(program) = self.models.get_mut(&model) {
            program.residency = residency;
        }
    }

    pub(super) fn known(&self, model: ModelId) -> ProgramLoadState {
        self.models.get(&model).map_or(ProgramLoadState::No, |program| program.known)
    }

    /// Records that the executor is told to load a model.
    pub(super) fn tell(&mut self, now: Timestamp, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model) {
            program.last_asked = now;
            self.known += usize::from(program.known == ProgramLoadState::No);
            program.known = ProgramLoadState::Told;
        }
    }

    pub(super) fn asked(&mut self, now: Timestamp, model: ModelId) {
        if let Some(program) = self.models.get_mut(&model) {
            program.last_asked = now;
        }
    }

    pub(super) fn loaded(&mut self, now: Timestamp, model: ModelId) {
        if let Some(program) =
            self.models.get_mut(&model).filter(|program| program.known == ProgramLoadState::Told)
        {
            program.known = ProgramLoadState::Loaded;
            program.since = Some(now);
        }
    }

    /// Records that the model's process died, or that no process could be started.
    pub(super) fn died(&mut self, now: Timestamp, model: ModelId, seed: u64) {
        if let Some(program) = self.models.get_mut(&model) {
            let new = || Box::new(ProcessBackoff { backoff: Backoff::new(RESTARTS, seed), until: now });
            let deaths = program.deaths.get_or_insert_with(new);
            deaths.until = deaths.backoff.died(now, program.since);
        }
        self.forget(model);
    }

    /// Returns the time from which a model may be loaded, after the deaths of its processes.
    pub(super) fn starts(&self, model: ModelId) -> Timestamp {
        let deaths = self.models.get(&model).and_then(|program| program.deaths.as_ref());
        deaths.map_or(Timestamp::ZERO, |deaths| deaths.until)
    }

    /// Records that the executor no longer has a model.
    pub(super) fn forget(&mut self, model: ModelId) {
        if let Some(program) =
            self.models.get_mut(&model).filter(|program| program.known != ProgramLoadState::No)
        {
            program.known = ProgramLoadState::No;
            program.since = None;
            self.known -= 1;
        }
    }

    /// Records that the executor has no models.
    pub(super) fn forget_all(&mut self) {
        for program in self.models.values_mut() {
            program.known = ProgramLoadState::No;
            program.since = None;
            program.deaths = None;
        }
        self.known = 0;
    }

    /// Returns the number of models that the GPU's executors have.
    pub(super) fn known_count(&self) -> usize {
        self.known
    }

    /// Returns the program to unload before another may be loaded, if the executor already has
    /// `max` programs: of the programs that `may_go`, the program with the oldest last request.
    pub(super) fn surplus(&self, max: usize, may_go: impl Fn(ModelId) -> bool) -> Option<ModelId> {
        if self.known < max {
            return None;
        }
        let idle = self
            .models
            .iter()
            .filter(|&(&model, program)| program.known != ProgramLoadState::No && may_go(model));
        idle.min_by_key(|(_, program)| program.last_asked).map(|(&model, _)| model)
    }

    /// Drops models that were removed and are not `used`, and returns each of them once.
    pub(super) fn sweep(&mut self, used: impl Fn(ModelId) -> bool) -> Vec<(ModelId, ProgramLoadState)> {
        if self.removed == 0 {
            return Vec::new();
        }
        let gone = self.models.iter().filter(|&(&model, program)| program.removed && !used(model));
        let gone: Vec<_> = gone.map(|(&model, program)| (model, program.known)).collect();
        for &(model, known) in &gone {
            self.models.remove(&model);
            self.removed -= 1;
            self.known -= usize::from(known != ProgramLoadState::No);
        }
        gone
    }
}
