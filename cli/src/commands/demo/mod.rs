//! `demo`: starts a cluster, publishes the example classifier or workflow, runs it on test images,
//! and suggests next steps. The demo uses only the verbs and the SDK that users have.

mod chaos;
mod classifier;
mod example;
mod telemetry;
mod traffic;
mod verb;

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use clap::{Args as _, FromArgMatches as _, ValueEnum};
use millrace_proto::trace::SpanRing;

use crate::cluster::InProcessCluster;
use crate::commands::up;
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::process::{StopSignals, ephemeral_dir};
use crate::session::ClusterSession;

const GPU_MEMORY: &str = "256MiB";
const GRACE: Duration = Duration::from_secs(5);

/// The number of spans to keep for traces: enough for the requests between two kills.
const KEPT_SPANS: NonZeroU32 = NonZeroU32::new(50_000).expect("it is not zero");

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
    // The settings of the user's cluster do not apply to this one.
    let settings = Config { artifacts: None, ..config.clone() };
    let options = up_options(args, folder.path())?;
    let plan = up::plan(&options, &settings, &folder.path().join("data"), kept)?;
    let cluster = InProcessCluster::start(plan).await?;
    println!("It is up: clients connect to {}.\n", cluster.client_addr());

    let session = session(&cluster, config)?;
    let go_on = match args.workflow {
        None => {
            classifier::show(&session, folder.path()).await?;
            if args.chaos {
                classifier::storm(&session).await?;
            }
            classifier::GO_ON
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

/// Returns the options of `millrace up` for the demo's cluster.
fn up_options(args: &Args, folder: &Path) -> Result<up::Args, CommandFailure> {
    let gpus = args.gpus.to_string();
    let sizes =
        ["--device", "emulated", "--gpus", &gpus, "--gpu-memory", GPU_MEMORY, "--host-memory", "1GiB"];
    let ports = ["--listen", "--internal-listen", "--worker-listen"].map(|flag| [flag, "127.0.0.1:0"]);
    let words = sizes.into_iter().chain(ports.into_iter().flatten()).map(OsString::from);
    let data = [OsString::from("--data-dir"), folder.join("data").into_os_string()];
    let command = up::Args::augment_args(clap::Command::new("up").no_binary_name(true));
    let parsed = command.try_get_matches_from(words.chain(data));
    let parsed = parsed.and_then(|matches| up::Args::from_arg_matches(&matches));
    parsed.map_err(|error| CommandFailure::failed(format!("the demo's cluster: {error}")))
}

fn session(cluster: &InProcessCluster, config: Config) -> Result<ClusterSession, CommandFailure> {
    let address = cluster.client_addr().to_string().parse();
    let endpoint = address.map_err(|error| CommandFailure::failed(format!("{error}")))?;
    ClusterSession::new(Config { endpoints: vec![endpoint], ..config })
}
