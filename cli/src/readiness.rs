//! Readiness of a cluster: the expected controllers and nodes, and the reason while some are
//! missing.

use std::num::NonZeroU32;
use std::time::Duration;

use millrace_client::{Admin, messages as wire};

use crate::clock;
use crate::failure::CommandFailure;

/// The longest time that a starting cluster may take until all parts are up.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// The first pause between two checks; each later pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// The longest pause between two checks.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// The expected size of a cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ExpectedCluster {
    /// The least number of voters that answer, with a leader among them. `None` skips the check.
    pub(crate) voters: Option<NonZeroU32>,
    /// The least number of connected nodes whose GPUs are all up. `None` skips the check.
    pub(crate) nodes: Option<NonZeroU32>,
}

impl ExpectedCluster {
    pub(crate) fn nodes(nodes: usize) -> Self {
        Self { nodes: u32::try_from(nodes).ok().and_then(NonZeroU32::new), ..Self::default() }
    }
}

/// Waits until each of these endpoints reports the expected cluster. The failure names the missing
/// part.
pub(crate) async fn reached(
    at: &[Admin],
    wanted: ExpectedCluster,
    timeout: Duration,
) -> Result<(), CommandFailure> {
    let deadline = clock::now() + timeout;
    let mut pause = PAUSE_MIN;
    let mut lacking = "no endpoint has answered".to_owned();
    let each = async {
        for admin in at {
            while let Some(missing) = look(admin, wanted).await {
                lacking = missing;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    };
    tokio::time::timeout_at(deadline, each).await.map_err(|_| {
        let timeout = humantime::format_duration(timeout);
        CommandFailure::timed_out(format!("the cluster is not ready after {timeout}: {lacking}"))
            .hint("see 'millrace cluster status' and 'millrace get nodes'")
    })
}

/// Returns the missing part in an endpoint's report.
async fn look(admin: &Admin, wanted: ExpectedCluster) -> Option<String> {
    if let Some(voters) = wanted.voters {
        let missing = match admin.cluster_status().await {
            Ok(status) => missing_voters(&status, voters.get() as usize),
            Err(error) => Some(error.to_string()),
        };
        if missing.is_some() {
            return missing;
        }
    }
    let wanted = wanted.nodes?.get() as usize;
    match admin.nodes().await {
        Ok(nodes) => missing_nodes(&nodes, wanted),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns the missing part of the controller group.
fn missing_voters(status: &wire::ClusterStatus, wanted: usize) -> Option<String> {
    let up = status.controllers.iter().filter(|it| it.voter && it.reachable).count();
    if up < wanted {
        let away = status.controllers.iter().find(|it| it.voter && !it.reachable);
        let why = away.map(|it| format!(" (controller {}: {})", it.id, it.unreachable_reason));
        return Some(format!("{up} of {wanted} voters are up{}", why.unwrap_or_default()));
    }
    (!status.quorum).then(|| "no controller leads".to_owned())
}

/// Returns the missing part of the nodes.
fn missing_nodes(nodes: &[wire::Node], wanted: usize) -> Option<String> {
    let connected = || nodes.iter().filter(|node| node.connected);
    if connected().count() < wanted {
        return Some(format!("{} of {wanted} workers are connected", connected().count()));
    }
    let is_up = |node: &wire::Node| !node.gpus.is_empty() && node.gpus.iter().all(|gpu| gpu.health == "Up");
    if connected().filter(|node| is_up(node)).count() >= wanted {
        return None;
    }
    let gpus = || connected().flat_map(|node| &node.gpus);
    let up = gpus().filter(|gpu| gpu.health == "Up").count();
    Some(format!("{up} of {} GPUs are up", gpus().count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_up_when_every_gpu_is_up() {
        let gpu = |health: &str| wire::Gpu { health: health.into(), ..Default::default() };
        let node = |gpus: Vec<wire::Gpu>| wire::Node { connected: true, gpus, ..Default::default() };
        assert_eq!(missing_nodes(&[], 1).unwrap(), "0 of 1 workers are connected");
        assert_eq!(missing_nodes(&[node(vec![])], 1).unwrap(), "0 of 0 GPUs are up");
        let starting = [node(vec![gpu("Up"), gpu("Starting")])];
        assert_eq!(missing_nodes(&starting, 1).unwrap(), "1 of 2 GPUs are up");
        assert_eq!(missing_nodes(&[node(vec![gpu("Up")])], 1), None);
        let gone = wire::Node { connected: false, ..node(vec![gpu("Unknown")]) };
        assert_eq!(
            missing_nodes(&[node(vec![gpu("Up")]), gone], 1),
            None,
            "a disconnected node does not count"
        );
    }

    #[test]
    fn a_group_is_up_when_its_voters_answer_and_one_leads() {
        let controller = |id, voter, reachable| wire::Controller {
            id,
            voter,
            reachable,
            unreachable_reason: if reachable { String::new() } else { "refused".into() },
            ..Default::default()
        };
        let group = |controllers: Vec<wire::Controller>, quorum| wire::ClusterStatus {
            controllers,
            quorum,
            ..Default::default()
        };
        let two = || vec![controller(1, true, true), controller(2, true, true), controller(3, false, true)];
        assert_eq!(missing_voters(&group(two(), true), 3).unwrap(), "2 of 3 voters are up");
        let one_away = vec![controller(1, true, true), controller(2, true, false)];
        assert_eq!(
            missing_voters(&group(one_away, true), 2).unwrap(),
            "1 of 2 voters are up (controller 2: refused)"
        );
        assert_eq!(missing_voters(&group(two(), false), 2).unwrap(), "no controller leads");
        assert_eq!(missing_voters(&group(two(), true), 2), None);
    }
}
