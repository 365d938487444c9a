//! `worker`: a worker, as a separate process. Its executors are its children.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

use millrace_client::Address;
use millrace_proto::trace::SpanRing;
use millrace_types::NodeName;
use millrace_worker::start::{RunningWorker, WorkerConfig};

use crate::commands::connections::ConnectionLimits;
use crate::commands::options::{
    ParentProcess, ServerOptions, WORKER_PORT, WorkerIdentity, WorkerOptions, advertised,
};
use crate::failure::CommandFailure;
use crate::private;
use crate::process::{self, StopSignals, WorkerReady, announce, executor_threads, loopback};

const HELP: &str = "\
When the worker listens, one line of JSON on standard output has its address. Without any controller
it serves the functions that it was told to serve before. The controllers tell it which functions to
serve, so it must know all of them. 'millrace get nodes' lists the worker once a controller accepted it.

Examples:
  millrace worker --name gpu-7 --data-dir /var/lib/millrace --controllers 10.0.0.1:7070,10.0.0.2:7070,10.0.0.3:7070 \\
      --listen 10.0.0.7:7080 --insecure
  millrace worker --name w1 --data-dir ./w1 --controllers 127.0.0.1:7070 --gpus 4 --gpu-memory 2GiB";

/// Run one worker.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// The worker's name, unique in the cluster.
    #[arg(long, value_name = "NAME")]
    name: NodeName,
    /// The directory of the model files and the worker's identity; no other process may use it.
    #[arg(long, value_name = "DIR", env = "MILLRACE_DATA_DIR")]
    data_dir: PathBuf,
    /// The internal addresses of all controllers.
    #[arg(long, value_delimiter = ',', required = true, value_name = "HOST:PORT")]
    controllers: Vec<Address>,
    /// The listen address for gateways; port 0 selects a free port.
    #[arg(long, value_name = "ADDRESS", default_value_t = loopback(WORKER_PORT))]
    listen: SocketAddr,
    /// The address at which gateways reach this worker [default: the listen address].
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<Address>,
    /// The threads for each GPU's launches [default: this machine's cores divided among its GPUs].
    #[arg(long, value_name = "N")]
    executor_threads: Option<NonZeroU32>,
    #[command(flatten)]
    machine: WorkerOptions,
    #[command(flatten)]
    connections: ConnectionLimits,
    #[command(flatten)]
    options: ServerOptions,
    #[command(flatten)]
    origin: ParentProcess,
}

pub(crate) async fn run(args: Args, kept: Option<SpanRing>) -> Result<(), CommandFailure> {
    args.origin.tie_lifetime()?;
    private::tighten(&args.data_dir)?;
    // Listen for signals before anything starts, so that no signal is missed.
    let mut stop = StopSignals::new()?;
    let config = WorkerConfig { kept, ..args.config()? };
    let mut worker = tokio::select! {
        worker = millrace_worker::start::start(config) => {
            worker.map_err(|error| CommandFailure::failed(format!("{}: {error}", args.name)))?
        }
        () = stop.asked() => return Ok(()),
    };
    announce(&line(&args.name, &worker))?;
    let ended = tokio::select! {
        () = stop.asked() => Ok(()),
        error = worker.failed() => Err(CommandFailure::failed(format!("{}: {error}", args.name))),
    };
    process::print_stopping(args.options.grace);
    tokio::select! {
        () = end(worker, args.options.grace) => ended,
        // Dropping the worker ends it, executors included.
        () = stop.asked() => Err(process::stopped_at_once()),
    }
}

async fn end(worker: RunningWorker, grace: std::time::Duration) {
    worker.drain(grace).await;
    worker.shutdown().await;
}

fn line(name: &NodeName, worker: &RunningWorker) -> WorkerReady {
    WorkerReady {
        ready: true,
        role: "worker".to_owned(),
        name: name.to_string(),
        address: worker.addr().to_string(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

impl Args {
    /// Returns the process name in spans.
    pub(crate) fn process_name(&self) -> String {
        self.name.to_string()
    }

    fn config(&self) -> Result<WorkerConfig, CommandFailure> {
        self.options.check_exposed(self.listen)?;
        let gpus = self.machine.gpus(NonZeroU32::MIN)?;
        let threads = self.executor_threads.map(NonZeroU32::get);
        let identity = WorkerIdentity {
            node: self.name.clone(),
            data_dir: self.data_dir.clone(),
            listen: self.listen,
            port: self.connections.of_worker()?,
            executor_threads: threads.map_or_else(|| executor_threads(gpus.topology.gpus.len()), Ok)?,
        };
        Ok(WorkerConfig {
            advertise: advertised(self.advertise.as_ref(), self.listen, "--advertise")?,
            controllers: self.controllers.iter().map(|it| it.authority().to_owned()).collect(),
            ..self.machine.config(&self.options, gpus, identity)?
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn args(line: &str) -> Result<Args, clap::Error> {
        options(["--name", "w", "--data-dir", "d"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn a_worker_is_configured_with_its_controllers_and_gpus() {
        let line = "--controllers a:1,b:2 --gpus 3 --executor-threads 2 --listen 127.0.0.1:0";
        let config = args(line).unwrap().config().unwrap();
        assert_eq!(config.controllers, ["a:1", "b:2"]);
        assert_eq!((config.topology.gpus.len(), config.executor_threads), (3, 2));
        assert!(args("").is_err(), "a worker needs its controllers");
    }
}
