//! The cluster in this process, except for the executors.

use std::path::{Path, PathBuf};

use millrace_proto::trace::SpanRing;
use serde_json::json;

use super::args::Args;
use crate::cluster::{InProcessCluster, LocalClusterPlan};
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::process::{self, StopSignals};
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
    let plan = LocalClusterPlan { kept: spans, ..plan(args, config, data_dir)? };
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

fn plan(args: &Args, config: &Config, data_dir: PathBuf) -> Result<LocalClusterPlan, CommandFailure> {
    alone(&data_dir)?;
    let gpus = args.machine.gpus(args.workers())?;
    Ok(LocalClusterPlan {
        data_dir,
        client: args.listen,
        internal: args.internal(),
        worker: args.worker(),
        workers: args.workers(),
        topology: gpus.topology,
        host_memory: args.machine.host_memory,
        object_memory: args.machine.object_memory,
        gpu_data: args.machine.gpu_data(),
        model_storage: args.machine.model_storage()?,
        preset: args.policy.preset,
        isolation: args.machine.isolation,
        engine: gpus.engine,
        device: gpus.device,
        programs: args.options.programs()?,
        faults: args.options.faults(),
        insecure: args.options.insecure,
        ports: args.connections.ports(args.workers())?,
        host_names: args.host_names.all(),
        artifacts: config.artifacts.clone(),
        kept: None,
    })
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
        let plan = plan(&args, &Config::empty(), folder.path().to_owned()).unwrap();
        let memory: Vec<_> = plan.topology.gpus.iter().map(|gpu| gpu.memory).collect();
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
        let refused = plan(&args, &Config::empty(), folder.path().to_owned()).unwrap_err();
        assert!(refused.hint.unwrap().contains("--controllers 3"));
    }
}
