//! What is installed on a node: functions, and the models they share. Numbers are not given twice.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use millrace_policy::admission::Score;
use millrace_policy::ids::FunctionIndex;
use millrace_types::{Bytes, Digest, FunctionKey, ModelId, Residency, RevisionKey, TenantName};

use crate::actors::function;
use crate::actors::gpu::ModelUsers;
use crate::install::{FunctionConfig, InstallError, PreparedModel};
use crate::programs::{Program, crew};
use crate::seams::Slot;

/// A function here.
pub(crate) struct Hosted {
    pub(crate) config: FunctionConfig,
    pub(crate) model: ModelId,
    pub(crate) slot: Slot<function::Message>,
    /// Its score, as its actor last had it: an actor that is started again counts on from here.
    pub(crate) score: Rc<Cell<Score>>,
    /// Its program and who runs it, if it is one.
    pub(crate) program: Option<Hosting>,
}

/// A program here.
pub(crate) struct Hosting {
    pub(crate) program: Arc<Program>,
    pub(crate) processes: u32,
    pub(crate) crew: Slot<crew::Message>,
}

struct Model {
    prepared: Arc<PreparedModel>,
    memory: Bytes,
    users: BTreeSet<FunctionIndex>,
    /// What of it stays on GPUs, as the actors were last told.
    residency: Residency,
}

/// A function that was added.
pub(crate) struct Added {
    pub(crate) function: FunctionIndex,
    /// Its model and the GPU memory to hold for it, where the model is new here.
    pub(crate) new_model: Option<(ModelId, Bytes)>,
}

/// What went with a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removed {
    /// Nothing else: others use its model.
    FunctionOnly(ModelId),
    /// Its model: it was the last to use it.
    WithModel(ModelId),
}

/// What is installed.
#[derive(Default)]
pub(crate) struct Registry {
    functions: BTreeMap<FunctionIndex, Hosted>,
    /// Those that take requests.
    by_key: BTreeMap<RevisionKey, FunctionIndex>,
    models: BTreeMap<ModelId, Model>,
    /// What revisions that are gone have counted: nothing served here goes uncharged because its
    /// function went. One small entry for each function ever served here.
    past: BTreeMap<FunctionKey, Score>,
    next_function: u32,
    next_model: u32,
}

impl Registry {
    /// Adds a function. `None` where it is here already.
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
            let entry = Model {
                prepared: Arc::clone(prepared),
                memory: needed,
                users: BTreeSet::new(),
                residency: Residency::default(),
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

    /// Adds a function that is a program. `None` where it is here already.
    pub(crate) fn add_program(
        &mut self,
        config: FunctionConfig,
        program: Arc<Program>,
        processes: u32,
    ) -> Option<FunctionIndex> {
        if self.by_key.contains_key(&config.key) {
            return None;
        }
        // A number that no model has.
        let model = self.new_model();
        let program = Hosting { program, processes, crew: Slot::empty() };
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
        let (slot, score) = (Slot::empty(), Rc::default());
        self.functions.insert(function, Hosted { config, model, slot, score, program });
        function
    }

    /// The artifact that a model comes from.
    pub(crate) fn digest_of(&self, model: ModelId) -> Option<Digest> {
        self.models.get(&model).map(|it| it.prepared.digest)
    }

    /// A model of this artifact that holds as much memory. Functions that want different amounts
    /// do not share.
    fn model_like(&self, digest: Digest, memory: Bytes) -> Option<ModelId> {
        let same = |model: &Model| model.prepared.digest == digest && model.memory == memory;
        self.models.iter().find(|(_, model)| same(model)).map(|(&model, _)| model)
    }

    /// Takes a function out of the ones that take requests.
    pub(crate) fn retire(&mut self, key: &RevisionKey) -> Option<(FunctionIndex, Slot<function::Message>)> {
        let index = self.by_key.remove(key)?;
        Some((index, self.functions.get(&index)?.slot.clone()))
    }

    /// Removes a function.
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

    /// The function of this key that takes requests.
    pub(crate) fn index_of(&self, key: &RevisionKey) -> Option<FunctionIndex> {
        self.by_key.get(key).copied()
    }

    pub(crate) fn indexed(&self) -> impl Iterator<Item = (FunctionIndex, &Hosted)> {
        self.functions.iter().map(|(&index, hosted)| (index, hosted))
    }

    /// The owner of each function here.
    pub(crate) fn owners(&self) -> impl Iterator<Item = (FunctionIndex, &TenantName)> + Clone {
        self.functions.iter().map(|(&index, hosted)| (index, &hosted.config.key.function.tenant))
    }

    pub(crate) fn functions(&self) -> impl Iterator<Item = &Hosted> {
        self.functions.values()
    }

    /// What revisions that are gone have counted, by function.
    pub(crate) fn past(&self) -> &BTreeMap<FunctionKey, Score> {
        &self.past
    }

    pub(crate) fn models(&self) -> impl Iterator<Item = (ModelId, Bytes, &Arc<PreparedModel>)> {
        self.models.iter().map(|(&model, entry)| (model, entry.memory, &entry.prepared))
    }

    /// What of a function's model is to stay on GPUs now, where that is not what the actors were told.
    pub(crate) fn new_residency(&mut self, model: ModelId) -> Option<Residency> {
        let entry = self.models.get_mut(&model)?;
        let of = |index: &FunctionIndex| Some(self.functions.get(index)?.config.serving.residency);
        let residency = entry.users.iter().filter_map(of).reduce(Residency::most).unwrap_or_default();
        if residency == entry.residency {
            return None;
        }
        entry.residency = residency;
        Some(residency)
    }

    /// What of each model is to stay, where that is anything.
    pub(crate) fn residencies(&self) -> impl Iterator<Item = (ModelId, Residency)> {
        let told = self.models.iter().map(|(&model, entry)| (model, entry.residency));
        told.filter(|&(_, residency)| residency != Residency::default())
    }

    /// The functions of each model, in order.
    pub(crate) fn users(&self) -> ModelUsers {
        let mut users = ModelUsers::new();
        for hosted in self.functions.values() {
            users.entry(hosted.model).or_default().push(hosted.config.key.clone());
        }
        users.values_mut().for_each(|keys| keys.sort());
        users
    }
}
