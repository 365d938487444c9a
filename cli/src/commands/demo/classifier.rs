//! `demo` without a workflow: the example classifier names the digits on its test images.

use std::path::Path;

use millrace_client::{InferRequest, Inference, TensorMetadata};

use super::chaos::{self, ChaosPlan, Evidence};
use super::example::{self, TestImage};
use super::telemetry;
use super::verb::verb;
use crate::clock;
use crate::commands::{apply, ps};
use crate::failure::CommandFailure;
use crate::output::responses;
use crate::session::ClusterSession;
use crate::tensors::{image, only_input};

/// The load and the kills.
const STORM: ChaosPlan =
    ChaosPlan { what: "requests", clients: 8, kills: 4, steady: 500, evidence: Evidence::None };

pub(super) async fn show(session: &ClusterSession, folder: &Path) -> Result<(), CommandFailure> {
    publish(session, folder).await?;
    classify(session).await
}

/// Sends the test images repeatedly, while executors are killed.
pub(super) async fn storm(session: &ClusterSession) -> Result<(), CommandFailure> {
    let inference = session.inference();
    let input = input(&inference).await?;
    let pictures = example::pictures()?;
    let requests = pictures.iter().map(|picture| request(picture, &input)).collect::<Result<_, _>>()?;
    let known = chaos::record_expected_responses(&inference, requests).await?;
    chaos::run(session, known, STORM).await
}

async fn publish(session: &ClusterSession, folder: &Path) -> Result<(), CommandFailure> {
    let manifest = example::unpack(folder)?;
    println!("$ millrace apply -f examples/digits/function.yaml");
    apply::run(verb(&["-f", &manifest.display().to_string()])?, session).await?;
    println!();
    Ok(())
}

async fn classify(session: &ClusterSession) -> Result<(), CommandFailure> {
    let inference = session.inference();
    let input = input(&inference).await?;
    println!("The test images, with the latency of each request (the first swaps the model in):");
    let mut right = 0;
    let pictures = example::pictures()?;
    for picture in &pictures {
        let answer = inference.infer(request(picture, &input)?).await?;
        let names = [picture.name.to_owned()];
        let best = answer.outputs.iter().find_map(|output| responses::best_classes(output, &names, 1, &[]));
        let best =
            best.ok_or_else(|| CommandFailure::failed("the example's answer has no scores"))?.join(" ");
        let split = answer.split.as_ref().map(responses::split_line).unwrap_or_default();
        println!("  {best:<24} {split}");
        right += usize::from(best.starts_with(&format!("{}: {} ", picture.name, picture.digit)));
    }
    settled(session).await?;
    println!("{right} of {} are correct.\n\n$ millrace ps", pictures.len());
    ps::run(verb(&[])?, session).await?;
    println!();
    if right < pictures.len() {
        return Err(CommandFailure::failed("the classifier no longer reads its test images"));
    }
    Ok(())
}

/// Waits until the nodes have reported the last request. Nodes report ten times per second.
async fn settled(session: &ClusterSession) -> Result<(), CommandFailure> {
    let deadline = clock::now() + telemetry::LAG_MAX;
    while clock::now() < deadline {
        let nodes = session.admin.nodes().await?;
        let models = nodes.iter().flat_map(|node| &node.gpus).flat_map(|gpu| &gpu.models);
        let idle = nodes.iter().flat_map(|node| &node.gpus).all(|gpu| gpu.running.is_empty());
        if idle && models.clone().count() > 0 && models.into_iter().all(|it| it.loaded_bytes > 0) {
            break;
        }
        tokio::time::sleep(telemetry::PAUSE).await;
    }
    Ok(())
}

async fn input(inference: &Inference) -> Result<TensorMetadata, CommandFailure> {
    Ok(only_input(&inference.model_metadata(example::NAME, "").await?)?.clone())
}

fn request(picture: &TestImage, input: &TensorMetadata) -> Result<InferRequest, CommandFailure> {
    let scale = image::Scale { mean: vec![0.0], std: vec![1.0] };
    let decoded = image::decode(picture.name, &picture.png)?;
    let tensor = image::tensor(&[decoded], input, &scale)?;
    Ok(InferRequest {
        outputs: vec!["probabilities".to_owned()],
        ..InferRequest::new(example::NAME, vec![tensor])
    })
}

pub(super) const GO_ON: &str = "\
Next steps (cargo install --path cli puts millrace on your PATH):
  millrace up                                          a cluster that keeps its data
  millrace apply -f examples/digits/function.yaml      publish this classifier, or your own model
  millrace invoke digits --image examples/digits/images/digit-3.png
  millrace load digits --concurrency 8                 measure it
  millrace demo --chaos                                kill executors under load
  millrace demo --workflow traffic                     functions in a graph
Clients of the Open Inference Protocol (tritonclient, KServe's SDK, curl) work unchanged: README.md.";
