//! The functions installed on a node, and the models that they share. Function and model numbers
//! are never reused.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use millrace_core::ids::FunctionIndex;
use millrace_scheduling::admission::FunctionTotals;
use millrace_types::{Bytes, Digest, FunctionKey, ModelId, ResidencyOptions, RevisionKey, TenantName};

use crate::actor_runtime::AddressSlot;
use crate::install::{FunctionConfig, InstallError, PreparedModel};
use crate::messages::gpu::ModelUsers;
use crate::messages::{function, process_pool};
use crate::programs::HostedProgram;

/// An installed function.
pub(crate) struct Hosted {
    pub(crate) config: FunctionConfig,
    pub(crate) model: ModelId,
    pub(crate) slot: AddressSlot<function::Message>,
    /// The function's score, as its actor last stored it: a restarted actor continues from here.
    pub(crate) score: Rc<Cell<FunctionTotals>>,
    /// The program and its processes, if the function is a program.
    pub(crate) program: Option<Hosting>,
}

/// An installed program.
pub(crate) struct Hosting {
    pub(crate) program: Arc<HostedProgram>,
    pub(crate) processes: u32,
    pub(crate) pool: AddressSlot<process_pool::Message>,
}

struct InstalledModel {
    prepared: Arc<PreparedModel>,
    memory: Bytes,
    users: BTreeSet<FunctionIndex>,
    /// The residency setting that the actors last received.
    residency: ResidencyOptions,
}

/// A newly installed function.
pub(crate) struct Added {
    pub(crate) function: FunctionIndex,
    /// The model and the GPU memory to reserve for it, if the model is new to the node.
    pub(crate) new_model: Option<(ModelId, Bytes)>,
}

/// The effect of a function's removal on its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removed {
    /// The model stays: other functions use it.
    FunctionOnly(ModelId),
    /// The model is removed too: the function was its last user.
    WithModel(ModelId),
}

/// The functions and models of a node.
#[derive(Default)]
pub(crate) struct Registry {
    functions: BTreeMap<FunctionIndex, Hosted>,
    /// The functions that accept requests.
    by_key: BTreeMap<RevisionKey, FunctionIndex>,
    models: BTreeMap<ModelId, InstalledModel>,
    /// Scores of revisions that were removed, so that their usage is still billed. One small entry
    /// for each function ever installed here.
    past: BTreeMap<FunctionKey, FunctionTotals>,
    next_function: u32,
    next_model: u32,
}

impl Registry {
    /// Adds a function. Returns `None` if the revision is already installed.
    ///
    /// # Errors
    /// [`InstallError::TooLarge`]; nothing is added then.
    pub(crate) fn add(
        &mut self,
        config: FunctionConfig,
        prepared: &Arc<PreparedModel>,
        largest: Bytes,
    ) -> Result<Option<Added>, InstallError> {
        if self.by_key.contains_key(&config.key) {
            return Ok(None);
        }
        let needed = config.gpu_memory.unwrap_or_default().max(prepared.weights_bytes);
        if needed > largest {
            return Err(InstallError::TooLarge { key: config.key, needed, largest });
        }
        let known = self.model_like(prepared.digest, needed);
        let model = known.unwrap_or_else(|| {
            let model = self.new_model();
            let entry = InstalledModel {
                prepared: Arc::clone(prepared),
                memory: needed,
                users: BTreeSet::new(),
                residency: ResidencyOptions::default(),
            };
            self.models.insert(model, entry);
            model
        });
        let function = self.insert(config, model, None);
        if let Some(entry) = self.models.get_mut(&model) {
            entry.users.insert(function);
        }
        let new_model = known.is_none().then_some((model, needed));
        Ok(Some(Added { function, new_model }))
    }

    /// Adds a function that is a program. Returns `None` if the revision is already installed.
    pub(crate) fn add_program(
        &mut self,
        config: FunctionConfig,
        program: Arc<HostedProgram>,
        processes: u32,
    ) -> Option<FunctionIndex> {
        if self.by_key.contains_key(&config.key) {
            return None;
        }
        // A program gets a model number that no model has.
        let model = self.new_model();
        let program = Hosting { program, processes, pool: AddressSlot::empty() };
        Some(self.insert(config, model, Some(program)))
    }

    fn new_model(&mut self) -> ModelId {
        let model = ModelId(self.next_model);
        self.next_model += 1;
        model
    }

    fn insert(&mut self, config: FunctionConfig, model: ModelId, program: Option<Hosting>) -> FunctionIndex {
        let function = FunctionIndex(self.next_function);
        self.next_function += 1;
        self.by_key.insert(config.key.clone(), function);
        let hosted = Hosted { config, model, slot: AddressSlot::empty(), score: Rc::default(), program };
        self.functions.insert(function, hosted);
        function
    }

    /// Returns the digest of the artifact that a model comes from.
    pub(crate) fn digest_of(&self, model: ModelId) -> Option<Digest> {
        self.models.get(&model).map(|it| it.prepared.digest)
    }

    /// Returns a model of this artifact that reserves the same memory. Functions that reserve
    /// different amounts do not share a model.
    fn model_like(&self, digest: Digest, memory: Bytes) -> Option<ModelId> {
        let same = |model: &InstalledModel| model.prepared.digest == digest && model.memory == memory;
        self.models.iter().find(|(_, model)| same(model)).map(|(&model, _)| model)
    }

    /// Stops a function from accepting requests. Its admitted requests are still answered.
    pub(crate) fn retire(
        &mut self,
        key: &RevisionKey,
    ) -> Option<(FunctionIndex, AddressSlot<function::Message>)> {
        let index = self.by_key.remove(key)?;
        Some((index, self.functions.get(&index)?.slot.clone()))
    }

    /// Removes a function, and its model if the function was the last user.
    pub(crate) fn remove(&mut self, function: FunctionIndex) -> Option<Removed> {
        let hosted = self.functions.remove(&function)?;
        let past = self.past.entry(hosted.config.key.function.clone()).or_default();
        *past = past.plus(hosted.score.get());
        let model = self.models.get_mut(&hosted.model)?;
        model.users.remove(&function);
        if !model.users.is_empty() {
            return Some(Removed::FunctionOnly(hosted.model));
        }
        self.models.remove(&hosted.model);
        Some(Removed::WithModel(hosted.model))
    }

    pub(crate) fn function(&self, index: FunctionIndex) -> Option<&Hosted> {
        self.functions.get(&index)
    }

    /// Returns the function of this key, if the function accepts requests.
    pub(crate) fn index_of(&self, key: &RevisionKey) -> Option<FunctionIndex> {
        self.by_key.get(key).copied()
    }

    pub(crate) fn indexed(&self) -> impl Iterator<Item = (FunctionIndex, &Hosted)> {
        self.functions.iter().map(|(&index, hosted)| (index, hosted))
    }

    /// Returns each installed function with its tenant.
    pub(crate) fn owners(&self) -> impl Iterator<Item = (FunctionIndex, &TenantName)> + Clone {
        self.functions.iter().map(|(&index, hosted)| (index, &hosted.config.key.function.tenant))
    }

    pub(crate) fn functions(&self) -> impl Iterator<Item = &Hosted> {
        self.functions.values()
    }

    /// Returns the scores of removed revisions, by function.
    pub(crate) fn past(&self) -> &BTreeMap<FunctionKey, FunctionTotals> {
        &self.past
    }

    pub(crate) fn models(&self) -> impl Iterator<Item = (ModelId, Bytes, &Arc<PreparedModel>)> {
        self.models.iter().map(|(&model, entry)| (model, entry.memory, &entry.prepared))
    }

    /// Returns a model's residency setting if the actors have an older setting, and records the new
    /// setting as sent.
    pub(crate) fn new_residency(&mut self, model: ModelId) -> Option<ResidencyOptions> {
        let entry = self.models.get_mut(&model)?;
        let of = |index: &FunctionIndex| Some(self.functions.get(index)?.config.serving.residency);
        let residency = entry.users.iter().filter_map(of).reduce(ResidencyOptions::most).unwrap_or_default();
        if residency == entry.residency {
            return None;
        }
        entry.residency = residency;
        Some(residency)
    }

    /// Returns the models with a residency setting other than the default.
    pub(crate) fn residencies(&self) -> impl Iterator<Item = (ModelId, ResidencyOptions)> {
        let told = self.models.iter().map(|(&model, entry)| (model, entry.residency));
        told.filter(|&(_, residency)| residency != ResidencyOptions::default())
    }

    /// Returns the functions of each model, sorted.
    pub(crate) fn users(&self) -> ModelUsers {
        let mut users = ModelUsers::new();
        for hosted in self.functions.values() {
            users.entry(hosted.model).or_default().push(hosted.config.key.clone());
        }
        users.values_mut().for_each(|keys| keys.sort());
        users
    }
}
