//! `autoscale`: starts and stops worker processes on this machine, by the cluster's scaling signal
//! (Torpor's cluster manager, T02; the replacement of a lost node, T16).

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use millrace_client::messages::{self as wire, NodeScheduling, NodeStatus};
use millrace_types::NodeName;

use crate::commands::connections::{ConnectionLimits, OF_WORKERS};
use crate::commands::options::{Permission, ServerOptions, WorkerOptions};
use crate::failure::CommandFailure;
use crate::process::{self, StopSignals, executor_threads};
use crate::processes::LogPrefix;
use crate::processes::provider::{LocalProcesses, NodeProvider};
use crate::session::ClusterSession;

const HELP: &str = "\
The autoscaler asks the cluster for the number of nodes it needs ('millrace get scaling'), subtracts
the nodes that others run, and starts the rest within its bounds. A surplus worker is drained first,
and stopped when it has no functions left. When the autoscaler stops, it stops its workers.

Examples:
  millrace autoscale --data-dir ./scaled --max 4
  millrace autoscale --data-dir ./scaled --min 1 --max 8 --gpus 2 --host-memory 4GiB -e 10.0.0.1:8080";

/// Run as many workers on this machine as the cluster needs.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// The folder in which each worker has a folder.
    #[arg(long, value_name = "DIR", env = "MILLRACE_DATA_DIR")]
    data_dir: PathBuf,
    /// The smallest number of workers to run here.
    #[arg(long, value_name = "N", default_value_t = 0)]
    min: u32,
    /// The largest number of workers to run here.
    #[arg(long, value_name = "N")]
    max: u32,
    /// The prefix of the workers' names; each autoscaler of a cluster needs its own.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    prefix: String,
    /// The interval between two looks at the scaling signal.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "2s")]
    every: Duration,
    #[command(flatten)]
    machine: WorkerOptions,
    #[command(flatten)]
    connections: ConnectionLimits,
    #[command(flatten)]
    options: ServerOptions,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    if args.min > args.max {
        return Err(CommandFailure::usage(format!("--min {} is more than --max {}", args.min, args.max)));
    }
    // Listen for signals before anything starts, so that no signal is missed.
    let mut stop = StopSignals::new()?;
    let mut local =
        LocalProcesses::new(args.data_dir.clone(), options(&args)?, args.options.grace, LogPrefix::Named);
    loop {
        // Change nothing if the cluster does not answer.
        if let Err(failure) = round(&args, session, &mut local).await {
            eprintln!(
                "the cluster did not answer, so nothing changes: {}",
                failure.message.unwrap_or_default()
            );
        }
        tokio::select! {
            () = tokio::time::sleep(args.every) => {}
            end = local.an_end() => eprintln!("{end}"),
            () = stop.asked() => break,
        }
    }
    process::print_stopping(args.options.grace);
    let all = async {
        for name in local.running() {
            local.stop(&name).await;
        }
    };
    tokio::select! {
        () = all => Ok(()),
        () = stop.asked() => Err(process::stopped_at_once()),
    }
}

fn options(args: &Args) -> Result<Vec<String>, CommandFailure> {
    let workers = NonZeroU32::new(args.max).unwrap_or(NonZeroU32::MIN);
    let machine = args.machine.gpus(workers)?;
    let gpus = machine.topology.gpus.len() * workers.get() as usize;
    let threads = vec!["--executor-threads".to_owned(), executor_threads(gpus)?.to_string()];
    args.connections.check(&OF_WORKERS)?;
    let connections = args.connections.words(&OF_WORKERS);
    Ok([
        args.machine.words(&machine),
        args.options.words(),
        args.options.allowed(&Permission::ALL),
        connections,
        threads,
    ]
    .concat())
}

/// Reads the scaling signal and takes a step.
async fn round(
    args: &Args,
    session: &ClusterSession,
    provider: &mut impl NodeProvider,
) -> Result<(), CommandFailure> {
    let admin = &session.admin;
    let signal = admin.scaling_signal().await?;
    let nodes = admin.nodes().await?;
    let own = provider.running();
    let step = decide(signal.nodes_needed, &nodes, &own, args);
    if let Some(step) = &step {
        eprintln!("{} nodes are needed: {}", signal.nodes_needed, step.in_words());
    }
    match step {
        None => {}
        Some(ScalingStep::Start(name)) => {
            let controllers = admin.cluster_status().await?.controllers;
            let addresses: Vec<_> = controllers.into_iter().map(|it| it.internal_address).collect();
            provider.start(&node_name(&name)?, &addresses)?;
        }
        Some(ScalingStep::Keep(name)) => {
            admin.set_scheduling(&node_name(&name)?, NodeScheduling::Schedulable).await?;
        }
        Some(ScalingStep::Drain(name)) => {
            admin.set_scheduling(&node_name(&name)?, NodeScheduling::Draining).await?;
        }
        Some(ScalingStep::Stop(name)) => provider.stop(&node_name(&name)?).await,
    }
    Ok(())
}

fn node_name(text: &str) -> Result<NodeName, CommandFailure> {
    NodeName::new(text).map_err(|error| CommandFailure::usage(error.to_string()))
}

/// The next step. A round takes a single step, so that the next round sees the effect.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ScalingStep {
    /// Starts a worker of this name.
    Start(String),
    /// Cancels the drain of a worker.
    Keep(String),
    /// Drains a worker, so that its functions move to other nodes.
    Drain(String),
    /// Stops a drained worker.
    Stop(String),
}

impl ScalingStep {
    fn in_words(&self) -> String {
        match self {
            Self::Start(name) => format!("starting {name}"),
            Self::Keep(name) => format!("keeping {name}"),
            Self::Drain(name) => format!("draining {name}"),
            Self::Stop(name) => format!("{name} is drained: stopping it"),
        }
    }
}

/// Decides the next step. Pure logic. A worker of this autoscaler that has not joined yet counts as
/// a node.
fn decide(needed: u32, nodes: &[wire::Node], own: &[NodeName], args: &Args) -> Option<ScalingStep> {
    let live = |node: &&wire::Node| node.status() != NodeStatus::Lost;
    let find = |name: &str| nodes.iter().filter(live).find(|node| node.name == name);
    let is_own = |node: &wire::Node| own.iter().any(|name| name.as_str() == node.name);
    let takes =
        |node: &wire::Node| !matches!(node.scheduling(), NodeScheduling::Draining | NodeScheduling::Cordoned);
    let others = nodes.iter().filter(live).filter(|node| takes(node) && !is_own(node)).count();
    let wanted = needed.saturating_sub(u32::try_from(others).unwrap_or(u32::MAX)).clamp(args.min, args.max);
    let (leaving, serving): (Vec<_>, Vec<_>) =
        own.iter().map(NodeName::as_str).partition(|name| find(name).is_some_and(|node| !takes(node)));
    let have = u32::try_from(serving.len()).unwrap_or(u32::MAX);
    if have < wanted {
        let unused = || (1u64..).map(|number| format!("{}-{number}", args.prefix));
        let free = |name: &String| find(name).is_none() && own.iter().all(|own| own.as_str() != name);
        return match leaving.first() {
            Some(name) => Some(ScalingStep::Keep((*name).to_owned())),
            None => unused().find(free).map(ScalingStep::Start),
        };
    }
    let drained = |name: &&&str| find(name).is_some_and(|node| node.placements == 0);
    if let Some(name) = leaving.iter().find(drained) {
        return Some(ScalingStep::Stop((*name).to_owned()));
    }
    // A worker that has not joined cannot be drained yet. Of the others, the worker with the fewest
    // placements is drained first.
    let joined = serving.iter().filter_map(|name| find(name)).filter(|_| have > wanted);
    joined.min_by_key(|node| (node.placements, &node.name)).map(|node| ScalingStep::Drain(node.name.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn args() -> Args {
        options(["--data-dir", "d", "--min", "1", "--max", "3"]).unwrap()
    }

    fn node(name: &str, scheduling: NodeScheduling, placements: u32) -> wire::Node {
        wire::Node { name: name.into(), scheduling: scheduling.into(), placements, ..Default::default() }
    }

    fn check(needed: u32, nodes: &[wire::Node], own: &[&str], expected: Option<ScalingStep>) {
        let own: Vec<_> = own.iter().map(|name| NodeName::new(name).unwrap()).collect();
        assert_eq!(decide(needed, nodes, &own, &args()), expected, "{needed} needed, own workers {own:?}");
    }

    #[test]
    fn missing_workers_are_started_within_the_bounds() {
        let start = |name: &str| Some(ScalingStep::Start(name.into()));
        let other = node("other", NodeScheduling::Schedulable, 1);
        check(0, &[], &[], start("auto-1"));
        check(2, &[], &["auto-1"], start("auto-2"));
        check(2, std::slice::from_ref(&other), &["auto-1"], None);
        check(9, &[], &["auto-1", "auto-2", "auto-3"], None);
        let taken = node("auto-1", NodeScheduling::Schedulable, 0);
        check(3, &[other, taken.clone()], &[], start("auto-2"));
        let lost = wire::Node { status: NodeStatus::Lost.into(), ..taken };
        check(1, &[lost], &[], start("auto-1"));
    }

    #[test]
    fn surplus_workers_are_drained_and_then_stopped() {
        let two = |scheduling, left| {
            [node("auto-1", NodeScheduling::Schedulable, 3), node("auto-2", scheduling, left)]
        };
        let own = ["auto-1", "auto-2"];
        let second = || "auto-2".to_owned();
        check(1, &two(NodeScheduling::Schedulable, 2), &own, Some(ScalingStep::Drain(second())));
        check(1, &two(NodeScheduling::Draining, 2), &own, None);
        check(1, &two(NodeScheduling::Draining, 0), &own, Some(ScalingStep::Stop(second())));
        check(2, &two(NodeScheduling::Draining, 2), &own, Some(ScalingStep::Keep(second())));
    }
}
