//! `demo`: starts a cluster, publishes the example classifier or workflow, runs it on test images,
//! and suggests next steps. The demo uses only the verbs and the SDK that users have.

mod chaos;
mod example;
mod traffic;

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use millrace_client::{InferRequest, Inference, TensorMetadata};
use millrace_proto::trace::SpanRing;
use millrace_types::Bytes;
use millrace_worker::service::InjectedFaults;
use millrace_worker::start::{DataConfig, ExecutorIsolation, OBJECT_MEMORY};

use crate::clock;
use crate::cluster::{InProcessCluster, LocalClusterPlan};
use crate::commands::demo::chaos::{ChaosPlan, Evidence};
use crate::commands::demo::example::TestImage;
use crate::commands::options::{AllConnections, topology};
use crate::commands::{apply, ps};
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::output::responses;
use crate::process::{StopSignals, ephemeral_dir, loopback};
use crate::session::ClusterSession;
use crate::tensors::{image, only_input};

const GPU_MEMORY: Bytes = Bytes::mib(256);
const HOST_MEMORY: Bytes = Bytes::gib(1);
const GRACE: Duration = Duration::from_secs(5);
/// The delay by which telemetry may lag behind the requests that a listing shows.
const TELEMETRY: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);

/// The number of spans to keep for traces: enough for the requests between two kills.
const KEPT_SPANS: NonZeroU32 = NonZeroU32::new(50_000).expect("it is not zero");

/// The chaos of the example classifier.
const STORM: ChaosPlan =
    ChaosPlan { what: "requests", clients: 8, kills: 4, steady: 500, evidence: Evidence::None };

/// Start a cluster, publish the example classifier and run it on its test images.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run this workflow in place of the classifier: functions in a graph, with the path of the
    /// data between them.
    #[arg(long, value_enum, value_name = "NAME")]
    workflow: Option<Workflow>,
    /// Kill executors (kill -9) under load; fail unless every request is answered.
    #[arg(long)]
    chaos: bool,
    /// The number of GPUs to emulate.
    #[arg(long, value_name = "N", default_value = "2")]
    gpus: NonZeroU32,
}

/// The example workflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Workflow {
    /// A detector, and a recogniser for each kind of object that it finds.
    Traffic,
}

impl Args {
    /// Returns whether the demo shows traces.
    pub(crate) fn reads_traces(&self) -> bool {
        self.workflow.is_some()
    }

    /// Returns the settings, with every request traced if the demo shows traces.
    pub(crate) fn settle(&self, config: Config) -> Config {
        if !self.reads_traces() {
            return config;
        }
        let keep_spans = config.keep_spans.max(Some(KEPT_SPANS));
        Config { keep_spans, trace_sample: 1.0, ..config }
    }
}

pub(crate) async fn run(args: Args, config: Config, kept: Option<SpanRing>) -> Result<(), CommandFailure> {
    let mut stop = StopSignals::new()?;
    tokio::select! {
        shown = show(&args, config, kept) => shown,
        // Dropping the cluster ends all parts, executors included.
        () = stop.asked() => Err(CommandFailure::failed("stopped")),
    }
}

async fn show(args: &Args, config: Config, kept: Option<SpanRing>) -> Result<(), CommandFailure> {
    let folder = ephemeral_dir()?;
    println!(
        "Starting a cluster here: a controller, a worker, and {} emulated GPUs of {GPU_MEMORY},",
        args.gpus
    );
    println!("each behind an executor process of its own.");
    let cluster = InProcessCluster::start(LocalClusterPlan { kept, ..plan(args, folder.path())? }).await?;
    println!("It is up: clients connect to {}.\n", cluster.client_addr());

    let session = session(&cluster, config)?;
    let go_on = match args.workflow {
        None => {
            show_classifier(args, &session, folder.path()).await?;
            GO_ON
        }
        Some(Workflow::Traffic) => {
            traffic::show(&session, folder.path()).await?;
            if args.chaos {
                traffic::storm(&session).await?;
            }
            traffic::GO_ON
        }
    };
    cluster.shutdown(GRACE).await;
    println!("{go_on}");
    Ok(())
}

async fn show_classifier(args: &Args, session: &ClusterSession, folder: &Path) -> Result<(), CommandFailure> {
    publish(session, folder).await?;
    classify(session).await?;
    if args.chaos {
        let inference = session.inference();
        let input = input(&inference).await?;
        let pictures = example::pictures()?;
        let requests = pictures.iter().map(|picture| request(picture, &input)).collect::<Result<_, _>>()?;
        let known = chaos::record_expected_responses(&inference, requests).await?;
        chaos::run(session, known, STORM).await?;
    }
    Ok(())
}

fn plan(args: &Args, folder: &Path) -> Result<LocalClusterPlan, CommandFailure> {
    Ok(LocalClusterPlan {
        ports: AllConnections::default().ports(NonZeroU32::MIN)?,
        data_dir: folder.join("data"),
        client: loopback(0),
        internal: loopback(0),
        worker: loopback(0),
        workers: NonZeroU32::MIN,
        topology: topology("emulated", Some(args.gpus), Some(GPU_MEMORY))?,
        host_memory: HOST_MEMORY,
        object_memory: OBJECT_MEMORY,
        gpu_data: DataConfig::default(),
        model_storage: HOST_MEMORY,
        preset: None,
        isolation: ExecutorIsolation::default(),
        programs: None,
        faults: InjectedFaults::Refuse,
        insecure: false,
        host_names: Vec::new(),
        artifacts: None,
        kept: None,
    })
}

fn session(cluster: &InProcessCluster, config: Config) -> Result<ClusterSession, CommandFailure> {
    let address = cluster.client_addr().to_string().parse();
    let endpoint = address.map_err(|error| CommandFailure::failed(format!("{error}")))?;
    ClusterSession::new(Config { endpoints: vec![endpoint], ..config })
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
    let deadline = clock::now() + TELEMETRY;
    while clock::now() < deadline {
        let nodes = session.admin.nodes().await?;
        let models = nodes.iter().flat_map(|node| &node.gpus).flat_map(|gpu| &gpu.models);
        let idle = nodes.iter().flat_map(|node| &node.gpus).all(|gpu| gpu.running.is_empty());
        if idle && models.clone().count() > 0 && models.into_iter().all(|it| it.loaded_bytes > 0) {
            break;
        }
        tokio::time::sleep(PAUSE).await;
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

/// Parses a verb's arguments, as if a user had typed them.
fn verb<A: clap::Args>(words: &[&str]) -> Result<A, CommandFailure> {
    let command = A::augment_args(clap::Command::new("verb").no_binary_name(true));
    let matches = command.try_get_matches_from(words);
    matches.and_then(|matches| A::from_arg_matches(&matches)).map_err(|error| {
        CommandFailure::failed(format!("the demo passed an argument that the verb does not accept: {error}"))
    })
}

const GO_ON: &str = "\
Next steps (cargo install --path cli puts millrace on your PATH):
  millrace up                                          a cluster that keeps its data
  millrace apply -f examples/digits/function.yaml      publish this classifier, or your own model
  millrace invoke digits --image examples/digits/images/digit-3.png
  millrace load digits --concurrency 8                 measure it
  millrace demo --chaos                                kill executors under load
  millrace demo --workflow traffic                     functions in a graph
Clients of the Open Inference Protocol (tritonclient, KServe's SDK, curl) work unchanged: README.md.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_passes_arguments_that_the_verbs_accept() {
        assert!(verb::<apply::Args>(&["-f", "x.yaml"]).is_ok());
        assert!(verb::<ps::Args>(&[]).is_ok());
        assert!(verb::<ps::Args>(&["--nonsense"]).is_err());
    }
}
