//! The status that a cluster reports of itself, and waiting until the status is as wanted.

use std::time::Duration;

use anyhow::bail;
use millrace_client::{Admin, messages as wire};

use super::test_cluster::TestCluster;
use crate::clock;

/// Maximum time for a cluster to reach a wanted state, after any fault.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two looks at the cluster's state.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// Maximum time of a look. An endpoint that hangs is asked again.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);

/// The status for which the harness waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatusGoal {
    /// Number of voters, which all have to answer, with a leader among them.
    pub voters: usize,
    /// Maximum number of log entries by which a voter may lag.
    pub lag_max: u64,
    /// Number of connected nodes, which need all their GPUs up.
    pub nodes: usize,
}

impl StatusGoal {
    /// Maximum lag of a voter while clients write, in log entries.
    pub const LAG_UNDER_LOAD: u64 = 100;
}

impl TestCluster {
    /// Waits until every running controller reports the wanted status.
    ///
    /// # Errors
    /// If the status is not reached within [`PATIENCE`], with the difference.
    pub async fn wait_for_status(&self, wanted: StatusGoal) -> anyhow::Result<()> {
        for (&id, controller) in &self.controllers {
            if controller.running.is_some() {
                let admin = self.admin_of(id)?;
                until(&format!("controller {id} reports the wanted status"), async || {
                    missing(&admin, wanted).await
                })
                .await?;
            }
        }
        Ok(())
    }

    /// Returns the first difference from the wanted status that a running controller reports.
    pub(crate) async fn status_difference(&self, wanted: StatusGoal) -> Option<String> {
        for (&id, controller) in &self.controllers {
            if controller.running.is_some() {
                let found = match self.admin_of(id) {
                    Ok(admin) => missing(&admin, wanted).await,
                    Err(error) => Some(error.to_string()),
                };
                if let Some(found) = found {
                    return Some(format!("controller {id} reports: {found}"));
                }
            }
        }
        None
    }

    /// Waits for a leader, and returns its id and its term.
    ///
    /// # Errors
    /// If no controller leads within [`PATIENCE`].
    pub async fn leader_and_term(&self) -> anyhow::Result<(u64, u64)> {
        leader_at(&self.admin()?, None).await
    }

    /// Waits until a controller other than `but` leads a majority, as these controllers report.
    /// Returns its id and its term.
    ///
    /// # Errors
    /// If no such controller leads within [`PATIENCE`].
    pub async fn leader_among(&self, ids: &[u64], but: Option<u64>) -> anyhow::Result<(u64, u64)> {
        leader_at(&self.admin_of_all(ids)?, but).await
    }

    /// Returns the id of the present leader.
    ///
    /// # Errors
    /// If no controller leads within [`PATIENCE`].
    pub async fn leader(&self) -> anyhow::Result<u64> {
        Ok(self.leader_and_term().await?.0)
    }
}

async fn leader_at(admin: &Admin, but: Option<u64>) -> anyhow::Result<(u64, u64)> {
    let mut leader = None;
    until("a controller leads", async || match admin.cluster_status().await {
        Ok(status) if status.quorum && status.leader != 0 && Some(status.leader) != but => {
            leader = Some((status.leader, status.term));
            None
        }
        Ok(status) => Some(format!("leader {}, quorum {}", status.leader, status.quorum)),
        Err(error) => Some(error.to_string()),
    })
    .await?;
    Ok(leader.expect("the wait ended with a leader"))
}

/// Repeats `look` until it returns nothing.
///
/// # Errors
/// If `look` still returns a difference after [`PATIENCE`], with that difference.
pub(crate) async fn until(what: &str, look: impl AsyncFnMut() -> Option<String>) -> anyhow::Result<()> {
    until_within(PATIENCE, what, look).await
}

/// Repeats `look` until it returns nothing, for at most `patience`.
pub(crate) async fn until_within(
    patience: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Option<String>,
) -> anyhow::Result<()> {
    let deadline = clock::now() + patience;
    loop {
        let missing = match tokio::time::timeout(LOOK_TIMEOUT, look()).await {
            Ok(None) => return Ok(()),
            Ok(Some(missing)) => missing,
            Err(_) => format!("no answer within {LOOK_TIMEOUT:?}"),
        };
        if clock::now() >= deadline {
            bail!("timed out after {patience:?} while waiting for this condition: {what}; {missing}");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn missing(admin: &Admin, wanted: StatusGoal) -> Option<String> {
    let status = match admin.cluster_status().await {
        Ok(status) => status,
        Err(error) => return Some(error.to_string()),
    };
    if let Some(missing) = missing_voters(&status, wanted) {
        return Some(missing);
    }
    match admin.nodes().await {
        Ok(nodes) => missing_nodes(&nodes, wanted.nodes),
        Err(error) => Some(error.to_string()),
    }
}

fn missing_voters(status: &wire::ClusterStatus, wanted: StatusGoal) -> Option<String> {
    if !status.quorum {
        return Some("no controller leads a majority".to_owned());
    }
    if let Some(away) = status.controllers.iter().find(|it| !it.reachable || !it.voter) {
        return Some(format!("controller {}: voter {}, {}", away.id, away.voter, away.unreachable_reason));
    }
    // The leader itself has no lag.
    let behind =
        |it: &&wire::Controller| it.id != status.leader && it.lag.is_none_or(|lag| lag > wanted.lag_max);
    if let Some(behind) = status.controllers.iter().find(behind) {
        return Some(format!("controller {} is behind by {:?} entries", behind.id, behind.lag));
    }
    let voters = status.controllers.len();
    (voters != wanted.voters).then(|| format!("{voters} voters instead of {}", wanted.voters))
}

fn missing_nodes(nodes: &[wire::Node], wanted: usize) -> Option<String> {
    for node in nodes {
        if !node.connected || node.status() != wire::NodeStatus::Live {
            return Some(format!("{}: connected {}, {:?}", node.name, node.connected, node.status()));
        }
        if let Some(gpu) = node.gpus.iter().find(|gpu| gpu.health != "Up") {
            return Some(format!("GPU {} of {} is {}", gpu.index, node.name, gpu.health));
        }
        if node.gpus.is_empty() {
            return Some(format!("{} has not reported its GPUs", node.name));
        }
    }
    (nodes.len() != wanted).then(|| format!("{} nodes instead of {wanted}", nodes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_voter_that_lags_or_is_unreachable_is_missing() {
        let controller = |id, reachable, lag| wire::Controller {
            id,
            voter: true,
            reachable,
            lag,
            unreachable_reason: if reachable { String::new() } else { "refused".into() },
            ..Default::default()
        };
        let status =
            |controllers| wire::ClusterStatus { quorum: true, leader: 1, controllers, ..Default::default() };
        let missing_voters =
            |status, voters| missing_voters(&status, StatusGoal { voters, ..StatusGoal::default() });
        let whole = || vec![controller(1, true, None), controller(2, true, Some(0))];
        assert_eq!(missing_voters(status(whole()), 2), None);
        assert_eq!(missing_voters(status(whole()), 3).unwrap(), "2 voters instead of 3");
        let away = vec![controller(1, true, None), controller(2, false, None)];
        assert!(missing_voters(status(away), 2).unwrap().contains("refused"));
        let behind = vec![controller(1, true, None), controller(2, true, Some(3))];
        assert!(missing_voters(status(behind), 2).unwrap().contains("behind"));
    }

    #[test]
    fn a_node_counts_once_it_is_connected_and_its_gpus_are_up() {
        let node = |health: &str, connected| wire::Node {
            name: "w".into(),
            connected,
            status: wire::NodeStatus::Live.into(),
            gpus: vec![wire::Gpu { health: health.into(), ..Default::default() }],
            ..Default::default()
        };
        assert_eq!(missing_nodes(&[node("Up", true)], 1), None);
        assert_eq!(missing_nodes(&[node("Up", true)], 2).unwrap(), "1 nodes instead of 2");
        assert!(missing_nodes(&[node("Starting", true)], 1).is_some());
        assert!(missing_nodes(&[node("Up", false)], 1).is_some());
    }
}
