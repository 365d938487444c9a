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
                Some(what) => left = what,
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

/// What keeps the first of these nodes that is not empty from being so.
fn still_there(nodes: &[wire::Node], drained: &[NodeName]) -> Option<String> {
    drained.iter().find_map(|name| {
        // One that was removed meanwhile is empty.
        let node = nodes.iter().find(|node| node.name == name.as_str())?;
        let running = node.gpus.iter().filter(|gpu| !gpu.running.is_empty()).count();
        let under_way = node.queued as usize + running;
        match (node.placements, under_way) {
            (0, 0) => None,
            (0, requests) => Some(format!("{name} has {requests} requests under way")),
            (1, _) => Some(format!("{name} has one function still to move")),
            (functions, _) => Some(format!("{name} has {functions} functions still to move")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_empty_without_functions_and_requests() {
        let node = |placements, queued, running: &str| {
            let gpus = vec![wire::Gpu { running: running.into(), ..Default::default() }];
            wire::Node { name: "a".into(), placements, queued, gpus, ..Default::default() }
        };
        let left = |node: wire::Node| still_there(&[node], &["a".parse().unwrap(), "b".parse().unwrap()]);
        assert_eq!(left(node(2, 5, "f")).unwrap(), "a has 2 functions still to move");
        assert_eq!(left(node(1, 0, "")).unwrap(), "a has one function still to move");
        assert_eq!(left(node(0, 1, "f")).unwrap(), "a has 2 requests under way");
        assert_eq!(left(node(0, 0, "")), None);
    }
}
