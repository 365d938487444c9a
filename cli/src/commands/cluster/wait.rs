//! `cluster wait`: waits for the expected cluster, for scripts that start or repair a cluster.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::failure::CommandFailure;
use crate::output::print;
use crate::progress;
use crate::readiness::{self, ExpectedCluster};
use crate::session::ClusterSession;

/// Wait until the cluster has the expected size; exit with 5 and name the missing part after the
/// timeout.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The least number of voters that answer, with a leader among them [default: a leader with a
    /// majority].
    #[arg(long, value_name = "N")]
    voters: Option<NonZeroU32>,
    /// The least number of connected nodes whose GPUs are all up.
    #[arg(long, value_name = "N")]
    nodes: Option<NonZeroU32>,
    /// The longest time to wait.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    timeout: Duration,
}

pub(super) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let wanted = ExpectedCluster { voters: args.voters.or(Some(NonZeroU32::MIN)), nodes: args.nodes };
    let line = progress::waiting("waiting for the cluster");
    let reached = readiness::reached(std::slice::from_ref(&session.admin), wanted, args.timeout).await;
    line.finish_and_clear();
    reached?;
    let voters = args.voters.map(|voters| format!("{voters} voters are up"));
    let nodes = args.nodes.map(|nodes| format!("{nodes} nodes are up"));
    let all = ["a controller leads".to_owned()].into_iter().chain(voters).chain(nodes);
    print(&all.collect::<Vec<_>>().join(", "))
}
