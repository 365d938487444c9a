//! The cluster in this process, except for the executors.

use std::path::{Path, PathBuf};

use millrace_controller::ControllerConfig;
use millrace_controller::config::ControllerLimits;
use millrace_proto::trace::SpanRing;
use millrace_worker::start::WorkerConfig;
use serde_json::json;

use super::args::Args;
use crate::cluster::{InProcessCluster, LocalClusterPlan, names, nth};
use crate::commands::options::{Permission, WorkerIdentity};
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::process::controller::inspection;
use crate::process::{self, StopSignals, executor_threads, seed};
use crate::processes::record;

pub(super) async fn run(
    args: &Args,
    config: &Config,
    data_dir: PathBuf,
    spans: Option<SpanRing>,
) -> Result<(), CommandFailure> {
    // Listen for signals before anything starts, so that no signal is missed.
    let mut stop = StopSignals::new()?;
    let kept = args.kept(&data_dir);
    let plan = plan(args, config, &data_dir, spans)?;
    let mut cluster = tokio::select! {
        cluster = InProcessCluster::start(plan) => cluster?,
        () = stop.asked() => return Ok(()),
    };
    announce(&cluster, &kept)?;
    let ended = tokio::select! {
        () = stop.asked() => Ok(()),
        failure = cluster.failed() => Err(failure),
    };
    process::print_stopping(args.options.grace);
    tokio::select! {
        () = cluster.shutdown(args.options.grace) => ended,
        // Dropping the cluster ends all parts, executors included.
        () = stop.asked() => Err(process::stopped_at_once()),
    }
}

/// Returns the controller and the workers of these options.
pub(crate) fn plan(
    args: &Args,
    config: &Config,
    data_dir: &Path,
    spans: Option<SpanRing>,
) -> Result<LocalClusterPlan, CommandFailure> {
    alone(data_dir)?;
    let gpus = args.machine.gpus(args.workers())?;
    let [client, internal, worker] = args.connections.ports(args.workers())?;
    let defaults = ControllerConfig::new(data_dir.join("controller"), seed()?);
    let controller = ControllerConfig {
        limits: ControllerLimits { client, internal, ..defaults.limits },
        client_listen: args.listen,
        internal_listen: args.internal(),
        allow_faults: args.options.allows(Permission::Faults),
        insecure: args.options.insecure,
        preset: args.policy.preset,
        host_names: args.host_names.all(),
        artifacts: config.artifacts.clone(),
        inspection: inspection()?,
        kept: spans.clone(),
        ..defaults
    };
    let names = names(args.workers())?;
    let executor_threads = executor_threads(gpus.topology.gpus.len() * names.len())?;
    let workers = (0u16..).zip(names).map(|(index, node)| {
        let identity = WorkerIdentity {
            data_dir: data_dir.join(node.as_str()),
            node,
            listen: nth(args.worker(), index)?,
            port: worker,
            executor_threads,
        };
        let config = args.machine.config(&args.options, gpus.clone(), identity)?;
        Ok(WorkerConfig { kept: spans.clone(), ..config })
    });
    Ok(LocalClusterPlan { controller, workers: workers.collect::<Result<_, CommandFailure>>()? })
}

/// Refuses the folder of a group, because a single controller has no majority.
fn alone(data_dir: &Path) -> Result<(), CommandFailure> {
    let controllers = record::read(data_dir)?.controllers.len();
    if controllers < 2 {
        return Ok(());
    }
    let message = format!(
        "{} holds a group of {controllers} controllers, and a single one has no majority",
        data_dir.display()
    );
    Err(CommandFailure::usage(message)
        .hint(format!("start all of them: millrace up --controllers {controllers}")))
}

/// Reports the cluster to people on stderr and to programs on stdout.
fn announce(cluster: &InProcessCluster, kept: &str) -> Result<(), CommandFailure> {
    let client = cluster.client_addr();
    eprintln!(
        "millrace is up: clients at {client} (gRPC and REST), {kept}\n\
         next: millrace apply -e {client} -f FUNCTION.yaml, millrace ps -e {client}; Ctrl-C stops it"
    );
    process::announce(&json!({
        "ready": true,
        "cluster": cluster.id(),
        "client": client.to_string(),
        "endpoints": [client.to_string()],
        "internal": cluster.internal_addr().to_string(),
        "workers": cluster.worker_addrs().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;
    use millrace_types::Bytes;

    #[test]
    fn gpus_have_the_given_number_and_memory() {
        let folder = tempfile::tempdir().unwrap();
        let args: Args = options(["--ephemeral", "--gpus", "3", "--gpu-memory", "2GiB"]).unwrap();
        let plan = plan(&args, &Config::empty(), folder.path(), None).unwrap();
        let memory: Vec<_> = plan.workers[0].topology.gpus.iter().map(|gpu| gpu.memory).collect();
        assert_eq!(memory, [Bytes::gib(2); 3]);
    }

    #[test]
    fn the_folder_of_a_group_is_refused_for_a_single_controller() {
        let folder = tempfile::tempdir().unwrap();
        let place = |id| record::ControllerAddresses {
            id,
            client: "127.0.0.1:1".parse().unwrap(),
            internal: "127.0.0.1:2".parse().unwrap(),
        };
        let record =
            record::GroupRecord { controllers: vec![place(1), place(2), place(3)], workers: Vec::new() };
        record::write(folder.path(), &record).unwrap();
        let args: Args = options([""; 0]).unwrap();
        let refused = plan(&args, &Config::empty(), folder.path(), None).unwrap_err();
        assert!(refused.hint.unwrap().contains("--controllers 3"));
    }
}
