//! `demo`: starts a cluster, publishes the example classifier or workflow, runs it on test images,
//! and suggests next steps. The demo uses only the verbs and the SDK that users have.

mod chaos;
mod classifier;
mod example;
mod telemetry;
mod traffic;
mod verb;

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use millrace_proto::trace::SpanRing;
use millrace_types::Bytes;
use millrace_worker::service::InjectedFaults;
use millrace_worker::start::{DataConfig, ExecutorDevice, ExecutorEngine, ExecutorIsolation, OBJECT_MEMORY};

use crate::cluster::{InProcessCluster, LocalClusterPlan};
use crate::commands::connections::ConnectionLimits;
use crate::commands::options::topology;
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::process::{StopSignals, ephemeral_dir, loopback};
use crate::session::ClusterSession;

const GPU_MEMORY: Bytes = Bytes::mib(256);
const HOST_MEMORY: Bytes = Bytes::gib(1);
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
    let cluster = InProcessCluster::start(LocalClusterPlan { kept, ..plan(args, folder.path())? }).await?;
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

fn plan(args: &Args, folder: &Path) -> Result<LocalClusterPlan, CommandFailure> {
    Ok(LocalClusterPlan {
        ports: ConnectionLimits::default().ports(NonZeroU32::MIN)?,
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
        engine: ExecutorEngine::default(),
        device: ExecutorDevice::default(),
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
