//! A group of controllers and workers, each in a separate process.

use std::num::NonZeroU32;
use std::path::PathBuf;

use millrace_controller::config::INTERNAL_PORT;
use serde_json::json;

use super::args::Args;
use crate::commands::connections::{OF_CLUSTERS, OF_CONTROLLERS, OF_WORKERS};
use crate::commands::options::Permission;
use crate::config::{Config, LogFormat};
use crate::failure::CommandFailure;
use crate::process::{self, StopSignals, executor_threads};
use crate::processes::{GroupPlan, LogPrefix, ProcessAddress, ProcessGroup, RestartPolicy};

pub(super) async fn run(args: &Args, config: &Config, data_dir: PathBuf) -> Result<(), CommandFailure> {
    // Listen for signals before anything starts, so that no signal is missed.
    let mut stop = StopSignals::new()?;
    let kept = args.kept(&data_dir);
    let plan = plan(args, config, data_dir)?;
    let mut group = tokio::select! {
        group = ProcessGroup::start(plan) => group?,
        () = stop.asked() => return Ok(()),
    };
    announce(&group, &kept)?;
    let ended = tokio::select! {
        () = stop.asked() => Ok(()),
        failure = group.watch() => Err(failure),
    };
    process::print_stopping(args.options.grace);
    tokio::select! {
        () = group.shutdown() => ended,
        // Dropping the group kills all processes, executors included.
        () = stop.asked() => Err(process::stopped_at_once()),
    }
}

fn plan(args: &Args, config: &Config, data_dir: PathBuf) -> Result<GroupPlan, CommandFailure> {
    args.options.check_exposed(args.listen)?;
    args.options.check_exposed(args.internal())?;
    args.connections.check(&OF_CLUSTERS)?;
    // Checked here too, so that the refusal is not the message of a worker among those of other processes.
    let machine = args.machine.gpus(args.workers())?;
    let gpus = machine.topology.gpus.len() * args.workers().get() as usize;
    let threads = ["--executor-threads".to_owned(), executor_threads(gpus)?.to_string()];
    Ok(GroupPlan {
        data_dir,
        client: args.listen,
        internal: args.internal_listen,
        internal_usual: args.usual(INTERNAL_PORT),
        worker: args.worker(),
        controllers: args.controllers,
        workers: args.workers(),
        common: [args.options.words(), log_words(config)].concat(),
        control: config
            .artifacts
            .iter()
            .flat_map(|place| ["--artifacts".to_owned(), place.to_string()])
            .chain(args.host_names.words())
            .chain(args.policy.words())
            .chain(args.connections.words(&OF_CONTROLLERS))
            .chain(args.options.allowed(&[Permission::Faults]))
            .collect(),
        machine: [
            args.machine.words(&machine),
            args.options.allowed(&Permission::ALL),
            args.connections.words(&OF_WORKERS),
            threads.to_vec(),
        ]
        .concat(),
        grace: args.options.grace,
        restart: if args.restart { RestartPolicy::WithBackoff } else { RestartPolicy::Never },
        log: match config.log_format {
            LogFormat::Text => LogPrefix::Named,
            LogFormat::Json => LogPrefix::AsIs,
        },
    })
}

/// Returns the logging options, so that every process logs as this process was told to.
fn log_words(config: &Config) -> Vec<String> {
    let format = match config.log_format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    let mut words = vec!["--log-format".to_owned(), format.to_owned()];
    // Pass these options always: the child processes read the same settings file and environment,
    // and flags override both.
    let sample = Some(config.trace_sample.to_string());
    let keep = Some(config.keep_spans.map_or(0, NonZeroU32::get).to_string());
    for (flag, value) in [
        ("--log", &config.log),
        ("--otlp-endpoint", &config.otlp_endpoint),
        ("--trace-sample", &sample),
        ("--keep-spans", &keep),
    ] {
        words.extend(value.iter().flat_map(|value| [flag.to_owned(), value.clone()]));
    }
    words
}

/// Reports the cluster to people on stderr and to programs on stdout.
fn announce(group: &ProcessGroup, kept: &str) -> Result<(), CommandFailure> {
    let endpoints = group.endpoints();
    let all = endpoints.join(",");
    let parts = group.whereabouts();
    eprintln!("millrace is up: clients at {all} (gRPC and REST), {kept}");
    for part in &parts {
        match part {
            ProcessAddress::Controller { name, pid, client, internal, .. } => {
                eprintln!("  {name:<12} pid {pid:<8} clients {client}, controllers and workers {internal}");
            }
            ProcessAddress::Worker { name, pid, address } => {
                eprintln!("  {name:<12} pid {pid:<8} gateways {address}");
            }
        }
    }
    eprintln!(
        "next: export MILLRACE_ENDPOINTS={all}, millrace cluster status, millrace apply -f FUNCTION.yaml; Ctrl-C stops all processes"
    );
    let internal = parts.iter().find_map(|part| match part {
        ProcessAddress::Controller { internal, .. } => Some(internal),
        ProcessAddress::Worker { .. } => None,
    });
    let workers: Vec<_> = parts
        .iter()
        .filter_map(|part| match part {
            ProcessAddress::Worker { address, .. } => Some(address),
            ProcessAddress::Controller { .. } => None,
        })
        .collect();
    process::announce(&json!({
        "ready": true,
        "cluster": group.id(),
        "client": endpoints.first(),
        "endpoints": endpoints,
        "internal": internal,
        "workers": workers,
        "parts": parts,
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
}
