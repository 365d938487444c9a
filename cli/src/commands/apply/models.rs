//! The models and programs of functions: files on this machine, checked as the server checks them,
//! or files in the cluster, named by their digests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use millrace_client::{Admin, Error, ModelFile, messages as wire};
use millrace_model::program::PackedProgram;
use millrace_proto::convert::tensor_spec_wire;
use millrace_types::Digest;
use millrace_types::workflow::Signature;

use crate::failure::CommandFailure;
use crate::manifests::{FunctionItem, ModelLocation};
use crate::progress;
use crate::session::ClusterSession;

/// A function of the manifests, and its model.
pub(super) struct LoadedFunction {
    pub(super) item: FunctionItem,
    pub(super) model: FunctionModel,
}

/// The model or program of a function, and the place of its file.
#[derive(Debug, Clone)]
pub(super) enum FunctionModel {
    /// A file on this machine. The cluster may have the same file.
    Local(LocalModel),
    /// A file that the cluster must have.
    Cluster(Digest),
}

/// A model or program in a file on this machine, checked.
#[derive(Debug, Clone)]
pub(super) struct LocalModel {
    pub(super) file: ModelFile,
    signature: Signature,
    weights_bytes: u64,
    parameters: u64,
    /// The number of launches. Zero for a program.
    launches: usize,
}

/// Reads the model of every function.
pub(super) fn read(items: Vec<FunctionItem>) -> Result<Vec<LoadedFunction>, CommandFailure> {
    let mut opened: BTreeMap<PathBuf, LocalModel> = BTreeMap::new();
    let mut functions = Vec::with_capacity(items.len());
    for item in items {
        let model = match &item.model {
            ModelLocation::Cluster(digest) => FunctionModel::Cluster(*digest),
            ModelLocation::File { path, declared } => {
                let model = match (declared, opened.get(path)) {
                    (Some(declared), _) => pack(&item, path, declared)?,
                    (None, Some(model)) => model.clone(),
                    (None, None) => {
                        let model = open(&item, path)?;
                        opened.insert(path.clone(), model.clone());
                        model
                    }
                };
                check_state(&item, &model.signature)?;
                FunctionModel::Local(model)
            }
        };
        functions.push(LoadedFunction { item, model });
    }
    Ok(functions)
}

/// Returns the models that the cluster does not have, each once.
pub(super) async fn missing(
    functions: &[LoadedFunction],
    admin: &Admin,
) -> Result<BTreeMap<Digest, LocalModel>, CommandFailure> {
    let local = functions.iter().filter_map(|function| match &function.model {
        FunctionModel::Local(model) => Some((model.file.digest(), model.clone())),
        FunctionModel::Cluster(_) => None,
    });
    let mut models: BTreeMap<Digest, LocalModel> = local.collect();
    if models.is_empty() {
        return Ok(models);
    }
    let digests: Vec<Digest> = models.keys().copied().collect();
    for found in admin.find_artifacts(&digests).await? {
        models.remove(&found);
    }
    Ok(models)
}

pub(super) async fn upload(model: &ModelFile, session: &ClusterSession) -> Result<(), CommandFailure> {
    let bar = progress::bytes(model.bytes(), format!("uploading {}", name_of(model.path())));
    let shown = bar.clone();
    let sent = session.admin.upload(model, move |bytes| shown.set_position(bytes)).await;
    bar.finish_and_clear();
    sent.map_err(|error| CommandFailure::from(error).about(model.path().display()))?;
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

impl FunctionModel {
    pub(super) fn digest(&self) -> Digest {
        match self {
            Self::Local(model) => model.file.digest(),
            Self::Cluster(digest) => *digest,
        }
    }
}

impl LocalModel {
    /// Describes the model for a server that does not have its file.
    pub(super) fn summary(&self) -> wire::ModelSummary {
        wire::ModelSummary {
            weights_bytes: self.weights_bytes,
            parameters: self.parameters,
            launches: u32::try_from(self.launches).unwrap_or(u32::MAX),
            inputs: self.signature.inputs.iter().map(tensor_spec_wire).collect(),
            outputs: self.signature.outputs.iter().map(tensor_spec_wire).collect(),
        }
    }
}

/// Returns the failure for a digest that the cluster does not have.
pub(super) fn unknown(item: &FunctionItem, digest: Digest) -> CommandFailure {
    CommandFailure::not_found(format!("the cluster does not have {digest}"))
        .about(subject(item))
        .hint("name the file in place of its digest: spec.model.file, or spec.program.file")
}

/// Checks, as the server will, that the model can keep the state that its function declares.
fn check_state(item: &FunctionItem, signature: &Signature) -> Result<(), CommandFailure> {
    let Some(sequences) = &item.spec.sequences else { return Ok(()) };
    let states = sequences.states(signature.into());
    states.map(drop).map_err(|error| CommandFailure::usage(error.to_string()).about(subject(item)))
}

/// Digests a model file and checks, as the server will, that the cluster can serve it.
fn open(item: &FunctionItem, path: &Path) -> Result<LocalModel, CommandFailure> {
    let unreadable = |error: Error| {
        CommandFailure::from(error)
            .about(subject(item))
            .hint("spec.model.file is relative to the manifest's folder")
    };
    let file = ModelFile::open(path).map_err(unreadable)?;
    let bytes =
        std::fs::read(path).map_err(|cause| unreadable(Error::File { path: path.to_owned(), cause }))?;
    let compiled = millrace_model::compile(&bytes.into()).map_err(|error| {
        CommandFailure::usage(format!("{}: {error}", path.display())).about(subject(item))
    })?;
    Ok(LocalModel {
        file,
        signature: Signature { inputs: compiled.summary.inputs, outputs: compiled.summary.outputs },
        weights_bytes: compiled.summary.weights_bytes,
        parameters: compiled.summary.parameters,
        launches: compiled.launches.len(),
    })
}

/// Packs a program with its declared inputs and outputs, checked as the server will.
fn pack(item: &FunctionItem, path: &Path, declared: &Signature) -> Result<LocalModel, CommandFailure> {
    let file = std::fs::read(path).map_err(|cause| {
        CommandFailure::from(Error::File { path: path.to_owned(), cause })
            .about(subject(item))
            .hint("spec.program.file is relative to the manifest's folder")
    })?;
    let program = PackedProgram { signature: declared.clone(), file: file.into() };
    let packed = program.pack().map_err(|error| {
        CommandFailure::usage(format!("{}: {error}", path.display())).about(subject(item))
    })?;
    Ok(LocalModel {
        file: ModelFile::packed(path, packed),
        signature: program.signature,
        weights_bytes: 0,
        parameters: 0,
        launches: 0,
    })
}

/// Returns the file and name of a function, for messages.
pub(super) fn subject(item: &FunctionItem) -> String {
    format!("{}: function {}", item.source.display(), item.spec.key.name)
}
