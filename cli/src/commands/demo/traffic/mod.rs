//! `demo --workflow traffic`: a detector and a recogniser for each kind of object process a frame,
//! and the request's trace shows the path of the data.
//!
//! | module | content |
//! |---|---|
//! | [`frame`] | the frames |
//! | [`paths`] | the paths, read from a trace |

mod frame;
mod paths;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use millrace_client::{InferRequest, InferResponse, Tensor, messages as wire};
use millrace_types::WorkflowSpec;
use millrace_types::manifest::Manifest;
use millrace_types::workflow::Step;

use self::frame::StreetFrame;
use self::paths::TensorPaths;
use super::chaos::{self, ChaosPlan, Evidence};
use super::telemetry;
use super::verb::verb;
use crate::clock;
use crate::commands::{apply, synth};
use crate::failure::CommandFailure;
use crate::output::responses;
use crate::session::ClusterSession;

const NAME: &str = "traffic";
/// The name of the workflow's input.
const INPUT: &str = "frame";
const MANIFEST: &str = include_str!("../../../../../examples/traffic/traffic.yaml");
/// The models: each file, and the arguments of `millrace synth` that write it.
const MODELS: [(&str, &[&str]); 3] = [
    ("detector.onnx", &["detector"]),
    ("person-net.onnx", &["tiny-cnn", "--seed", "6"]),
    ("vehicle-net.onnx", &["tiny-cnn", "--seed", "11"]),
];
const SEED: u64 = 20;

/// Returns the demo's frames: a street with people and vehicles, and one without vehicles.
fn frames() -> [StreetFrame; 2] {
    [StreetFrame::draw(SEED, 24, 16), StreetFrame::draw(SEED + 1, 9, 0)]
}

pub(super) async fn show(session: &ClusterSession, folder: &Path) -> Result<(), CommandFailure> {
    publish(session, folder).await?;
    let [both, people_alone] = frames();
    println!(
        "A drawn frame with {} red squares (people) and {} blue ones (vehicles):",
        both.people, both.vehicles
    );
    pass(session, &both).await?;
    println!("A frame with {} people and no vehicles:", people_alone.people);
    pass(session, &people_alone).await?;
    println!("{LEGEND}\n");
    Ok(())
}

/// Sends the same frame repeatedly, while executors are killed.
pub(super) async fn storm(session: &ClusterSession) -> Result<(), CommandFailure> {
    let [both, _] = frames();
    let known = chaos::record_expected_responses(&session.inference(), vec![request(&both)?]).await?;
    let storm = ChaosPlan { what: "workflows", clients: 4, kills: 6, steady: 40, evidence: Evidence::Traces };
    chaos::run(session, known, storm).await
}

async fn publish(session: &ClusterSession, folder: &Path) -> Result<(), CommandFailure> {
    for (file, words) in MODELS {
        println!("$ millrace synth {} --out examples/traffic/{file}", words.join(" "));
        let path = folder.join(file).display().to_string();
        synth::run(&verb(&[words, &["--out", &path]].concat())?)?;
    }
    let manifest = unpack(folder)?;
    println!("\n$ millrace apply -f examples/traffic/traffic.yaml");
    apply::run(verb(&["-f", &manifest.display().to_string()])?, session).await?;
    println!();
    Ok(())
}

fn unpack(folder: &Path) -> Result<PathBuf, CommandFailure> {
    let path = folder.join("traffic.yaml");
    std::fs::write(&path, MANIFEST)
        .map_err(|error| CommandFailure::failed(format!("cannot write {}: {error}", path.display())))?;
    Ok(path)
}

/// Returns the workflow of the manifest.
fn workflow() -> Result<WorkflowSpec, CommandFailure> {
    let manifests = millrace_types::manifest::parse(MANIFEST)
        .map_err(|error| CommandFailure::failed(error.to_string()))?;
    let workflow = manifests.into_iter().find_map(|manifest| match manifest {
        Manifest::Workflow(workflow) => Some(workflow),
        _ => None,
    });
    workflow.ok_or_else(|| CommandFailure::failed("the example has no workflow"))
}

fn request(frame: &StreetFrame) -> Result<InferRequest, CommandFailure> {
    Ok(InferRequest::new(NAME, vec![frame.tensor(INPUT)?]))
}

/// Sends a frame, and prints the response and the path of the data.
async fn pass(session: &ClusterSession, frame: &StreetFrame) -> Result<(), CommandFailure> {
    let spec = workflow()?;
    let answer = session.inference().infer(request(frame)?).await?;
    let trace = trace(session, &spec, &answer.request_id).await?;
    let hops = TensorPaths::new(&spec, &trace);
    let skipped = hops.skipped();
    for (output, drawn) in [("people", frame.people), ("vehicles", frame.vehicles)] {
        println!("  {}", line(&answer, output, drawn, &skipped)?);
    }
    println!("  {}\n", answer.split.as_ref().map(responses::split_line).unwrap_or_default());
    println!("{}", hops.table());
    Ok(())
}

/// Waits for the complete trace of an answered request.
async fn trace(
    session: &ClusterSession,
    spec: &WorkflowSpec,
    id: &str,
) -> Result<wire::Trace, CommandFailure> {
    let deadline = clock::now() + telemetry::LAG_MAX;
    loop {
        let found = session.admin.trace(id).await;
        if let Ok(trace) = &found
            && TensorPaths::new(spec, trace).is_whole()
        {
            return Ok(found?);
        }
        if clock::now() >= deadline {
            found?;
            return Err(CommandFailure::timed_out(format!("the trace of {id} is incomplete")));
        }
        tokio::time::sleep(telemetry::PAUSE).await;
    }
}

/// Describes the objects of a kind that were found, by recognised class.
fn line(
    answer: &InferResponse,
    output: &str,
    drawn: usize,
    skipped: &[&Step],
) -> Result<String, CommandFailure> {
    let none = || CommandFailure::failed(format!("the answer has no {output}"));
    let scores = answer.outputs.iter().find(|tensor| tensor.name() == output).ok_or_else(none)?;
    let classes = classes(scores)?;
    if classes.len() != drawn {
        return Err(CommandFailure::failed(format!(
            "{} {output} were found, but {drawn} were drawn",
            classes.len()
        )));
    }
    if let Some(step) = skipped.iter().find(|step| step.name.as_str() == output) {
        let when = step.when.as_ref().map(ToString::to_string).unwrap_or_default();
        return Ok(format!("{output}: none; {when} is 0, so that step {:?} did not run", step.name.as_str()));
    }
    let mut counts = BTreeMap::new();
    for class in classes {
        *counts.entry(class).or_insert(0) += 1;
    }
    let counts: Vec<_> = counts.iter().map(|(class, count)| format!("{count} of class {class}")).collect();
    Ok(format!("{output}: {drawn}, {}", counts.join(", ")))
}

/// Returns the best class of each row.
fn classes(scores: &Tensor) -> Result<Vec<usize>, CommandFailure> {
    let width = scores.shape().last().and_then(|&dim| usize::try_from(dim).ok()).unwrap_or_default();
    let values = scores.to_f32().map_err(millrace_client::Error::from)?;
    let best = |row: &[f32]| {
        let best = row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.map(|(class, _)| class).unwrap_or_default()
    };
    Ok(values.chunks(width.max(1)).map(best).collect())
}

const LEGEND: &str = "\
METHOD is the path of an input: 'request' with the request itself, 'intra-gpu' in place, because the
previous step left it on the GPU, 'host' over the host memory of the same worker (and 'inter-gpu' over
NVLinks, on a machine that has them: millrace up --device dgx-v100).
WAIT is the step's wait for a GPU, TIME the time in which the worker found or fetched the input; '-' is
a value that the trace does not have. The recognisers' weights are random, so their classes mean
nothing.";

pub(super) const GO_ON: &str = "\
Next steps (cargo install --path cli puts millrace on your PATH), after the three 'synth' above:
  millrace up --keep-spans 20000                       a cluster that keeps running, with traces
  millrace apply -f examples/traffic/traffic.yaml      publish the workflow and its functions
  millrace describe workflow/traffic                   a workflow's inputs, outputs and graph
  millrace invoke workflow/traffic --image examples/traffic/frame.png
  millrace trace REQUEST                               all spans of a request
  millrace demo --workflow traffic --chaos             kill executors under workflows
examples/traffic/README.md has the same by hand, docs/guide/workflows.md all features of workflows.";

#[cfg(test)]
mod tests {
    use millrace_types::manifest::ModelSource;
    use millrace_types::workflow::{Signature, StepTarget};

    use super::*;

    const README: &str = include_str!("../../../../../examples/traffic/README.md");

    #[test]
    fn the_readme_writes_the_same_models_as_the_demo() {
        for (file, words) in MODELS {
            let command =
                format!("cargo run --release -- synth {} --out examples/traffic/{file}\n", words.join(" "));
            assert!(README.contains(&command), "{command}");
        }
    }

    #[test]
    fn the_manifest_matches_the_networks() {
        let folder = tempfile::tempdir().unwrap();
        let mut signatures = BTreeMap::new();
        for (file, words) in MODELS {
            let path = folder.path().join(file);
            synth::run(&verb(&[words, &["--out", &path.display().to_string()]].concat()).unwrap()).unwrap();
            let compiled = millrace_model::compile(&std::fs::read(path).unwrap().into()).unwrap();
            let signature = Signature { inputs: compiled.summary.inputs, outputs: compiled.summary.outputs };
            signatures.insert(file.to_owned(), signature);
        }
        let manifests = millrace_types::manifest::parse(MANIFEST).unwrap();
        let functions = manifests.into_iter().filter_map(Manifest::function);
        let file = |source| match source {
            ModelSource::File { path, .. } => path,
            ModelSource::Cluster(digest) => panic!("{digest} is not in the folder"),
        };
        let files: BTreeMap<_, _> = functions
            .map(|function| (StepTarget::Function(function.spec.key.name), file(function.model)))
            .collect();
        let signature = workflow().unwrap().check(|run| signatures.get(files.get(run)?)).unwrap();
        let names = |tensors: &[millrace_types::TensorSpec]| {
            tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&signature.inputs), [INPUT]);
        assert_eq!(names(&signature.outputs), ["people", "vehicles"]);
    }
}
