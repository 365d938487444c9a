//! `cordon`, `drain`, `uncordon`: whether a node takes functions on, before its machine is worked on
//! and after.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_types::NodeName;

use crate::clock;
use crate::failure::Failure;
use crate::output::print;
use crate::progress;
use crate::session::Session;

/// How often a drain is looked at.
const PAUSE: Duration = Duration::from_millis(200);

/// Let nodes keep what they have, and give them nothing new.
#[derive(Debug, clap::Args)]
pub(crate) struct Cordon {
    /// The nodes.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<NodeName>,
}

/// Let nodes take functions on again.
#[derive(Debug, clap::Args)]
pub(crate) struct Uncordon {
    /// The nodes.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<NodeName>,
}

const DRAIN: &str = "\
Functions move first: each is ready on another node before it leaves this one, and requests under way
finish. A node stays as it is until 'millrace uncordon', also when its worker starts again.

Examples:
  millrace drain worker-1 && kill -TERM PID     empty it, then stop its worker
  millrace drain worker-1 --timeout 10m
  millrace drain worker-1 --no-wait             'millrace get operations' shows how far it is";

/// Move everything off nodes, and wait until they are empty.
#[derive(Debug, clap::Args)]
#[command(after_help = DRAIN)]
pub(crate) struct Drain {
    /// The nodes.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<NodeName>,
    /// How long to wait.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "5m")]
    timeout: Duration,
    /// Only say that they are to be drained.
    #[arg(long)]
    no_wait: bool,
}

pub(crate) async fn cordon(args: Cordon, session: &Session) -> Result<(), Failure> {
    set(&args.nodes, wire::NodeScheduling::Cordoned, "cordoned", nothing, session).await
}

pub(crate) async fn uncordon(args: Uncordon, session: &Session) -> Result<(), Failure> {
    set(&args.nodes, wire::NodeScheduling::Schedulable, "uncordoned", nothing, session).await
}

pub(crate) async fn drain(args: Drain, session: &Session) -> Result<(), Failure> {
    let (draining, wish) = ("draining", wire::NodeScheduling::Draining);
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
                None => return Ok::<_, Failure>(()),
                Some(Left { node, what, drained: false }) => {
                    let message = format!("node/{node} is drained no more, and has {what}");
                    return Err(Failure::failed(message).hint(
                        "its drain was cancelled, or it was taken back: 'millrace get operations' shows it; drain it again",
                    ));
                }
                Some(Left { node, what, drained: true }) => left = format!("{node} has {what}"),
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
            return Err(Failure::timed_out(format!("not drained after {timeout}: {left}")).hint(
                "it goes on: 'millrace get nodes' shows how far it is, and whether another node could take what is left; 'millrace uncordon' ends it",
            ));
        }
    }
    args.nodes.iter().try_for_each(|node| print(&format!("node/{node} drained")))
}

fn nothing(_node: &wire::Node) -> String {
    String::new()
}

/// What to wait for, unless it is over already.
fn operation(node: &wire::Node) -> String {
    if node.operation.is_empty() { String::new() } else { format!(": operation/{}", node.operation) }
}

async fn set(
    nodes: &[NodeName],
    scheduling: wire::NodeScheduling,
    done: &str,
    more: impl Fn(&wire::Node) -> String,
    session: &Session,
) -> Result<(), Failure> {
    for node in nodes {
        let set = session.admin.set_scheduling(node, scheduling).await;
        let set = set.map_err(|error| Failure::from(error).about(format_args!("node/{node}")))?;
        print(&format!("node/{node} {done}{}", more(&set)))?;
    }
    Ok(())
}

/// What is left on a node.
#[derive(Debug, PartialEq)]
struct Left<'a> {
    node: &'a NodeName,
    what: String,
    /// Whether it will go.
    drained: bool,
}

/// What keeps the first of these nodes that is not empty from being so; before all others, of one that
/// nobody drains any more.
fn still_there<'a>(nodes: &[wire::Node], drained: &'a [NodeName]) -> Option<Left<'a>> {
    let left = drained.iter().filter_map(|name| {
        // One that was removed meanwhile is empty.
        let node = nodes.iter().find(|node| node.name == name.as_str())?;
        let running = node.gpus.iter().filter(|gpu| !gpu.running.is_empty()).count();
        let under_way = node.queued as usize + running;
        let what = match (node.placements, under_way) {
            (0, 0) => return None,
            (0, requests) => format!("{requests} requests under way"),
            (1, _) => "one function still to move".to_owned(),
            (functions, _) => format!("{functions} functions still to move"),
        };
        let drained = node.scheduling() == wire::NodeScheduling::Draining;
        Some(Left { node: name, what, drained })
    });
    // Of equals the first.
    left.min_by_key(|left| left.drained)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_empty_without_functions_and_requests() {
        let node = |placements, queued, running: &str| {
            let gpus = vec![wire::Gpu { running: running.into(), ..Default::default() }];
            let scheduling = wire::NodeScheduling::Draining.into();
            wire::Node { name: "a".into(), placements, queued, gpus, scheduling, ..Default::default() }
        };
        let names = ["a".parse().unwrap(), "b".parse().unwrap()];
        let left = |node: wire::Node| still_there(&[node], &names).map(|left| left.what);
        assert_eq!(left(node(2, 5, "f")).unwrap(), "2 functions still to move");
        assert_eq!(left(node(1, 0, "")).unwrap(), "one function still to move");
        assert_eq!(left(node(0, 1, "f")).unwrap(), "2 requests under way");
        assert_eq!(left(node(0, 0, "")), None);
    }

    #[test]
    fn a_node_that_is_drained_no_more_comes_before_those_that_are() {
        let node = |name: &str, placements, scheduling: wire::NodeScheduling| {
            let scheduling = scheduling.into();
            wire::Node { name: name.into(), placements, scheduling, ..Default::default() }
        };
        let names = ["a".parse().unwrap(), "b".parse().unwrap()];
        let drained = |b| {
            let nodes = [node("a", 2, wire::NodeScheduling::Draining), node("b", 1, b)];
            let left = still_there(&nodes, &names).unwrap();
            (left.node.to_string(), left.drained)
        };
        assert_eq!(drained(wire::NodeScheduling::Draining), ("a".to_owned(), true));
        assert_eq!(drained(wire::NodeScheduling::Cordoned), ("b".to_owned(), false));
        let empty = [node("a", 0, wire::NodeScheduling::Schedulable)];
        assert_eq!(still_there(&empty, &names), None, "it was emptied");
    }
}
