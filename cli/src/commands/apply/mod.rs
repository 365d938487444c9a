//! `apply`: creates functions or makes their next revisions.
//!
//! Everything is checked before anything is stored: all manifests and models here, then, where
//! there are several functions, all of them by the server without storing. Only models the cluster
//! does not have are sent.

pub(crate) mod manifests;
mod ready;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_client::{Applied, ApplyOptions, Error, ModelFile, Outcome, messages as wire};
use millrace_types::{Digest, Reason};

use crate::commands::apply::manifests::Item;
use crate::failure::Failure;
use crate::output::{Format, Output, documents, print};
use crate::progress;
use crate::session::Session;

/// Create functions from manifests, or make their next revisions.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A manifest, a folder of them, or - for standard input. May be repeated.
    #[arg(short, long, required = true, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Check everything, store nothing.
    #[arg(long)]
    dry_run: bool,
    /// How long to wait until the functions are ready to serve.
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_value = "30s",
        default_missing_value = "30s",
        value_parser = humantime::parse_duration
    )]
    wait: Duration,
    /// Do not wait until the functions are ready.
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    #[command(flatten)]
    output: Output,
}

/// A function asked for, with its model read.
struct Wanted {
    item: Item,
    model: ModelFile,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let wanted = read(&args.file, session)?;
    let missing = missing_models(&wanted, session).await?;
    if args.dry_run {
        return dry_run(&wanted, &missing, session).await;
    }
    for model in missing.values() {
        upload(model, session).await?;
    }
    if wanted.len() > 1 {
        for wanted in &wanted {
            apply(wanted, session, ApplyOptions { dry_run: true, resource_version: None }).await?;
        }
    }
    let mut functions = Vec::with_capacity(wanted.len());
    for wanted in &wanted {
        let applied = apply(wanted, session, ApplyOptions::default()).await?;
        if matches!(args.output.output, Format::Table | Format::Wide) {
            print(&outcome_line(wanted, applied.outcome, ""))?;
        }
        functions.push(applied.function);
    }
    if !args.no_wait {
        functions = ready::wait(functions, session, args.wait).await?;
    }
    show(functions, args.output.output)
}

/// Reads every manifest and model file there is a word of.
fn read(paths: &[PathBuf], session: &Session) -> Result<Vec<Wanted>, Failure> {
    let mut models: BTreeMap<PathBuf, ModelFile> = BTreeMap::new();
    let mut wanted = Vec::new();
    for item in manifests::read(paths, &session.config.tenant)? {
        let model = match models.get(&item.model) {
            Some(model) => model.clone(),
            None => open(&item)?,
        };
        models.insert(item.model.clone(), model.clone());
        wanted.push(Wanted { item, model });
    }
    Ok(wanted)
}

/// Digests a model file and checks, as the server will, that it can be served.
fn open(item: &Item) -> Result<ModelFile, Failure> {
    let subject = || format!("{}: function {}", item.source.display(), item.spec.key.name);
    let unreadable = |error: Error| {
        Failure::from(error).about(subject()).hint("spec.model.file is relative to the manifest's folder")
    };
    let file = ModelFile::open(&item.model).map_err(unreadable)?;
    let bytes = std::fs::read(&item.model)
        .map_err(|cause| unreadable(Error::File { path: item.model.clone(), cause }))?;
    millrace_model::compile(&bytes.into())
        .map_err(|error| Failure::usage(format!("{}: {error}", item.model.display())).about(subject()))?;
    Ok(file)
}

/// The models the cluster does not have, each once.
async fn missing_models(
    wanted: &[Wanted],
    session: &Session,
) -> Result<BTreeMap<Digest, ModelFile>, Failure> {
    let digests: BTreeSet<Digest> = wanted.iter().map(|wanted| wanted.model.digest()).collect();
    let digests: Vec<Digest> = digests.into_iter().collect();
    let found: BTreeSet<Digest> = session.admin.find_artifacts(&digests).await?.into_iter().collect();
    let missing = wanted.iter().filter(|wanted| !found.contains(&wanted.model.digest()));
    Ok(missing.map(|wanted| (wanted.model.digest(), wanted.model.clone())).collect())
}

async fn upload(model: &ModelFile, session: &Session) -> Result<(), Failure> {
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

async fn apply(wanted: &Wanted, session: &Session, options: ApplyOptions) -> Result<Applied, Failure> {
    let applied = session.admin.apply(&wanted.item.spec, wanted.model.digest(), options).await;
    applied
        .map_err(|error| Failure::from(error).about(format_args!("function/{}", wanted.item.spec.key.name)))
}

/// Asks the server to check what it can without the models it lacks, and says what would happen.
async fn dry_run(
    wanted: &[Wanted],
    missing: &BTreeMap<Digest, ModelFile>,
    session: &Session,
) -> Result<(), Failure> {
    for wanted in wanted {
        let outcome = if missing.contains_key(&wanted.model.digest()) {
            match session.admin.function(&wanted.item.spec.key).await {
                Ok(_) => Outcome::Configured,
                Err(error) if error.reason() == Some(Reason::FunctionNotFound) => Outcome::Created,
                Err(error) => return Err(error.into()),
            }
        } else {
            apply(wanted, session, ApplyOptions { dry_run: true, resource_version: None }).await?.outcome
        };
        print(&outcome_line(wanted, outcome, " (dry run)"))?;
    }
    Ok(())
}

fn outcome_line(wanted: &Wanted, outcome: Outcome, suffix: &str) -> String {
    let word = match outcome {
        Outcome::Created => "created",
        Outcome::Configured => "configured",
        Outcome::Unchanged => "unchanged",
    };
    format!("function/{} {word}{suffix}", wanted.item.spec.key.name)
}

fn show(functions: Vec<wire::Function>, format: Format) -> Result<(), Failure> {
    let documents: Vec<_> = functions.into_iter().map(documents::Function::from).collect();
    let whole = match documents.as_slice() {
        [one] => crate::output::document(format, one)?,
        several => crate::output::document(format, &several)?,
    };
    whole.map_or(Ok(()), |text| print(&text))
}
