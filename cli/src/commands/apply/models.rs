//! The models and programs that functions are made of: from files, checked as the server will, or those
//! that the cluster has already.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use millrace_client::{Admin, Error, ModelFile};
use millrace_model::program::Program;
use millrace_types::Digest;
use millrace_types::workflow::Signature;

use super::Function;
use super::check::signature;
use super::manifests::{Item, ModelAt};
use crate::failure::Failure;
use crate::progress;
use crate::session::Session;

/// A model, and what it takes and gives.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) digest: Digest,
    pub(super) signature: Signature,
    /// What is sent where the cluster does not have it; `None`: it has.
    file: Option<ModelFile>,
}

/// Every function with its model.
pub(super) async fn read(items: Vec<Item>, admin: &Admin) -> Result<Vec<Function>, Failure> {
    let kept = kept(&items, admin).await?;
    let mut opened: BTreeMap<PathBuf, Model> = BTreeMap::new();
    let mut functions = Vec::with_capacity(items.len());
    for item in items {
        let model = match &item.model {
            ModelAt::Cluster(digest) => of_cluster(&item, *digest, &kept)?,
            ModelAt::File { path, declared: Some(declared) } => pack(&item, path, declared)?,
            ModelAt::File { path, declared: None } => match opened.get(path) {
                Some(model) => model.clone(),
                None => {
                    let model = open(&item, path)?;
                    opened.insert(path.clone(), model.clone());
                    model
                }
            },
        };
        check_state(&item, &model.signature)?;
        functions.push(Function { item, model });
    }
    Ok(functions)
}

/// The model files that the cluster does not have, each once.
pub(super) async fn missing(
    functions: &[Function],
    admin: &Admin,
) -> Result<BTreeMap<Digest, ModelFile>, Failure> {
    let files = functions.iter().filter_map(|function| function.model.file.clone());
    let mut files: BTreeMap<Digest, ModelFile> = files.map(|file| (file.digest(), file)).collect();
    if files.is_empty() {
        return Ok(files);
    }
    let digests: Vec<Digest> = files.keys().copied().collect();
    for found in admin.find_artifacts(&digests).await? {
        files.remove(&found);
    }
    Ok(files)
}

pub(super) async fn upload(model: &ModelFile, session: &Session) -> Result<(), Failure> {
    let bar = progress::bytes(model.bytes(), format!("uploading {}", name_of(model.path())));
    let shown = bar.clone();
    let sent = session.admin.upload(model, move |bytes| shown.set_position(bytes)).await;
    bar.finish_and_clear();
    sent.map_err(|error| Failure::from(error).about(model.path().display()))?;
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

impl Model {
    fn of_file(file: ModelFile, signature: Signature) -> Self {
        Self { digest: file.digest(), signature, file: Some(file) }
    }

    /// One that the cluster has.
    pub(super) fn of_cluster(digest: Digest, signature: Signature) -> Self {
        Self { digest, signature, file: None }
    }
}

/// What the cluster has of what is named by its digest.
async fn kept(items: &[Item], admin: &Admin) -> Result<BTreeMap<Digest, Signature>, Failure> {
    let digest = |item: &Item| match item.model {
        ModelAt::Cluster(digest) => Some(digest),
        ModelAt::File { .. } => None,
    };
    let digests: BTreeSet<Digest> = items.iter().filter_map(digest).collect();
    if digests.is_empty() {
        return Ok(BTreeMap::new());
    }
    let digests: Vec<Digest> = digests.into_iter().collect();
    let found = admin.find_models(&digests).await?;
    found.into_iter().map(|(digest, model)| Ok((digest, signature(model.inputs, model.outputs)?))).collect()
}

fn of_cluster(item: &Item, digest: Digest, kept: &BTreeMap<Digest, Signature>) -> Result<Model, Failure> {
    let signature = kept.get(&digest).cloned().ok_or_else(|| {
        Failure::not_found(format!("the cluster does not have {digest}"))
            .about(subject(item))
            .hint("name the file in place of its digest: spec.model.file, or spec.program.file")
    })?;
    Ok(Model::of_cluster(digest, signature))
}

/// Checks, as the server will, that the model can keep the state that its function names.
fn check_state(item: &Item, signature: &Signature) -> Result<(), Failure> {
    let Some(sequences) = &item.spec.sequences else { return Ok(()) };
    let states = sequences.states(signature.into());
    states.map(drop).map_err(|error| Failure::usage(error.to_string()).about(subject(item)))
}

/// Digests a model file and checks, as the server will, that it can be served.
fn open(item: &Item, path: &Path) -> Result<Model, Failure> {
    let unreadable = |error: Error| {
        Failure::from(error).about(subject(item)).hint("spec.model.file is relative to the manifest's folder")
    };
    let file = ModelFile::open(path).map_err(unreadable)?;
    let bytes =
        std::fs::read(path).map_err(|cause| unreadable(Error::File { path: path.to_owned(), cause }))?;
    let compiled = millrace_model::compile(&bytes.into())
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())).about(subject(item)))?;
    let signature = Signature { inputs: compiled.summary.inputs, outputs: compiled.summary.outputs };
    Ok(Model::of_file(file, signature))
}

/// Packs a program with what it declares, checked as the server will.
fn pack(item: &Item, path: &Path, declared: &Signature) -> Result<Model, Failure> {
    let file = std::fs::read(path).map_err(|cause| {
        Failure::from(Error::File { path: path.to_owned(), cause })
            .about(subject(item))
            .hint("spec.program.file is relative to the manifest's folder")
    })?;
    let program = Program { declared: declared.clone(), file: file.into() };
    let packed = program
        .pack()
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())).about(subject(item)))?;
    Ok(Model::of_file(ModelFile::packed(path, packed), program.declared))
}

/// Which function of which file, for messages.
fn subject(item: &Item) -> String {
    format!("{}: function {}", item.source.display(), item.spec.key.name)
}
