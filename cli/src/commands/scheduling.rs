//! `cordon`, `drain`, `uncordon`: whether a node accepts functions, before and after maintenance of
//! its machine.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_types::NodeName;

use crate::clock;
use crate::failure::CommandFailure;
use crate::output::print;
use crate::progress;
use crate::session::ClusterSession;

/// The interval between two looks at a drain.
const PAUSE: Duration = Duration::from_millis(200);

/// Let nodes keep their functions, but give them no new ones.
#[derive(Debug, clap::Args)]
pub(crate) struct Cordon {
    /// The nodes to cordon.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<NodeName>,
}

/// Let nodes accept functions again.
#[derive(Debug, clap::Args)]
pub(crate) struct Uncordon {
    /// The nodes to uncordon.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<NodeName>,
}

const DRAIN: &str = "\
Functions move first: each is ready on another node before it leaves this one, and running requests
finish. A node stays drained until 'millrace uncordon', even when its worker restarts.

Examples:
  millrace drain worker-1 && kill -TERM PID     drain the node, then stop its worker
  millrace drain worker-1 --timeout 10m
  millrace drain worker-1 --no-wait             'millrace get operations' shows the progress";

/// Move everything off nodes, and wait until they are empty.
#[derive(Debug, clap::Args)]
#[command(after_help = DRAIN)]
pub(crate) struct Drain {
    /// The nodes to drain.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<NodeName>,
    /// The longest time to wait.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "5m")]
    timeout: Duration,
    /// Start the drain without waiting for its end.
    #[arg(long)]
    no_wait: bool,
}

pub(crate) async fn cordon(args: Cordon, session: &ClusterSession) -> Result<(), CommandFailure> {
    set(&args.nodes, wire::NodeScheduling::Cordoned, "cordoned", nothing, session).await
}

pub(crate) async fn uncordon(args: Uncordon, session: &ClusterSession) -> Result<(), CommandFailure> {
    set(&args.nodes, wire::NodeScheduling::Schedulable, "uncordoned", nothing, session).await
}

pub(crate) async fn drain(args: Drain, session: &ClusterSession) -> Result<(), CommandFailure> {
    let draining = "draining";
    let wish = wire::NodeScheduling::Draining;
    if args.no_wait {
        return set(&args.nodes, wish, draining, operation, session).await;
    }
    set(&args.nodes, wish, draining, nothing, session).await?;
    let line = progress::waiting("draining");
    let mut left = String::new();
    let emptied = async {
        loop {
            let nodes = session.admin.nodes().await?;
            match still_there(&nodes, &args.nodes) {
                None => return Ok::<_, CommandFailure>(()),
                Some(DrainRemainder { node, what, still_draining: false }) => {
                    let message = format!("node/{node} is no longer draining, and has {what}");
                    return Err(CommandFailure::failed(message).hint(
                        "its drain was cancelled, or the node was uncordoned: see 'millrace get operations', or drain the node again",
                    ));
                }
                Some(DrainRemainder { node, what, still_draining: true }) => {
                    left = format!("{node} has {what}")
                }
            }
            line.set_message(left.clone());
            tokio::time::sleep(PAUSE).await;
        }
    };
    let emptied = tokio::time::timeout_at(clock::now() + args.timeout, emptied).await;
    line.finish_and_clear();
    match emptied {
        Ok(emptied) => emptied?,
        Err(_) => {
            let timeout = humantime::format_duration(args.timeout);
            return Err(CommandFailure::timed_out(format!("not drained after {timeout}: {left}")).hint(
                "the drain continues: 'millrace get nodes' shows its progress, and whether another node has room for the rest; 'millrace uncordon' ends it",
            ));
        }
    }
    args.nodes.iter().try_for_each(|node| print(&format!("node/{node} drained")))
}

fn nothing(_node: &wire::Node) -> String {
    String::new()
}

/// Names the operation of a drain, unless the drain has already ended.
fn operation(node: &wire::Node) -> String {
    if node.operation.is_empty() { String::new() } else { format!(": operation/{}", node.operation) }
}

async fn set(
    nodes: &[NodeName],
    scheduling: wire::NodeScheduling,
    done: &str,
    more: impl Fn(&wire::Node) -> String,
    session: &ClusterSession,
) -> Result<(), CommandFailure> {
    for node in nodes {
        let set = session.admin.set_scheduling(node, scheduling).await;
        let set = set.map_err(|error| CommandFailure::from(error).about(format_args!("node/{node}")))?;
        print(&format!("node/{node} {done}{}", more(&set)))?;
    }
    Ok(())
}

/// The remaining functions and requests of a node.
#[derive(Debug, PartialEq)]
struct DrainRemainder<'a> {
    node: &'a NodeName,
    what: String,
    still_draining: bool,
}

/// Returns the first node that is not empty, and the reason. A node that is no longer draining
/// comes before the others.
fn still_there<'a>(nodes: &[wire::Node], asked: &'a [NodeName]) -> Option<DrainRemainder<'a>> {
    let left = asked.iter().filter_map(|name| {
        // A node that was removed meanwhile is empty.
        let node = nodes.iter().find(|node| node.name == name.as_str())?;
        let running: usize = node.gpus.iter().map(|gpu| gpu.running.len()).sum();
        let under_way = node.queued as usize + running;
        let what = match (node.placements, under_way) {
            (0, 0) => return None,
            (0, requests) => format!("{requests} requests in flight"),
            (1, _) => "one function still to move".to_owned(),
            (functions, _) => format!("{functions} functions still to move"),
        };
        let still_draining = node.scheduling() == wire::NodeScheduling::Draining;
        Some(DrainRemainder { node: name, what, still_draining })
    });
    // Among equals, `min_by_key` returns the first.
    left.min_by_key(|left| left.still_draining)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_empty_without_functions_and_requests() {
        let node = |placements, queued, running: &str| {
            let request = wire::RunningRequest { function: running.into(), ..Default::default() };
            let running = Some(request).filter(|it| !it.function.is_empty()).into_iter().collect();
            let gpus = vec![wire::Gpu { running, ..Default::default() }];
            let scheduling = wire::NodeScheduling::Draining.into();
            wire::Node { name: "a".into(), placements, queued, gpus, scheduling, ..Default::default() }
        };
        let names = ["a".parse().unwrap(), "b".parse().unwrap()];
        let left = |node: wire::Node| still_there(&[node], &names).map(|left| left.what);
        assert_eq!(left(node(2, 5, "f")).unwrap(), "2 functions still to move");
        assert_eq!(left(node(1, 0, "")).unwrap(), "one function still to move");
        assert_eq!(left(node(0, 1, "f")).unwrap(), "2 requests in flight");
        assert_eq!(left(node(0, 0, "")), None);
    }

    #[test]
    fn a_node_that_is_no_longer_draining_is_reported_first() {
        let node = |name: &str, placements, scheduling: wire::NodeScheduling| {
            let scheduling = scheduling.into();
            wire::Node { name: name.into(), placements, scheduling, ..Default::default() }
        };
        let names = ["a".parse().unwrap(), "b".parse().unwrap()];
        let drained = |b| {
            let nodes = [node("a", 2, wire::NodeScheduling::Draining), node("b", 1, b)];
            let left = still_there(&nodes, &names).unwrap();
            (left.node.to_string(), left.still_draining)
        };
        assert_eq!(drained(wire::NodeScheduling::Draining), ("a".to_owned(), true));
        assert_eq!(drained(wire::NodeScheduling::Cordoned), ("b".to_owned(), false));
        let empty = [node("a", 0, wire::NodeScheduling::Schedulable)];
        assert_eq!(still_there(&empty, &names), None, "the node is empty");
    }
}
