//! Collects the traffic between functions in workflow runs from all controllers while this controller
//! leads (D19). The measurements stay out of Raft: they guide placement only, and are learned again.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use millrace_nodes::placement::TrafficCounts;

use super::duties::Duties;
use crate::peers::traffic;
use crate::raft::{PeerClient, TrafficClass};

/// The interval between two collections.
const ASK_EVERY: Duration = Duration::from_secs(10);

/// Collects while polled: as long as this controller leads.
pub(super) async fn keep(duties: &Duties) {
    loop {
        look(duties).await;
        tokio::time::sleep(ASK_EVERY).await;
    }
}

async fn look(duties: &Duties) {
    let others = duties.replica.others(TrafficClass::Requests);
    let own = duties.replica.id().0;
    let controllers: BTreeSet<u64> = others.iter().map(PeerClient::id).chain([own]).collect();
    let asked = join_all(others.into_iter().map(traffic::ask)).await;
    let state = duties.replica.state();
    // A controller that does not answer is asked again later. Its counts are cumulative, so nothing is
    // lost.
    let told = asked.into_iter().filter_map(|(id, told)| Some((id, told?)));
    let told = told.chain([(own, duties.passed.told(&state))]);
    duties.measured.send_modify(|measured| {
        for (controller, told) in told {
            measured.take(controller, told.into_iter().map(TrafficCounts::from).collect());
        }
        measured.retain(&controllers, |workflow| Some(state.workflow(workflow)?.generation));
    });
}

#[cfg(test)]
mod tests {
    use futures::future::select_all;
    use millrace_cluster_state::{CallerName, StateCommand};
    use millrace_nodes::placement::{MeasuredTraffic, RUNS_MIN};
    use millrace_types::{Bytes, Revision};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::config::{ControllerLimits, JoinAs};
    use crate::fixtures::{chain, functions, key};
    use crate::fleet::WorkerFleet;
    use crate::passed::RunTraffic;
    use crate::raft::group_tests::{Node, first, until};

    /// Time for several collections, in case a controller misses the first.
    const WAIT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn the_leader_learns_the_traffic_of_runs_on_all_controllers() {
        let a = first().await;
        let b = Node::start(2, a.joining(JoinAs::Voter)).await;
        let workflow = StateCommand::ApplyWorkflow { spec: chain(&[("s", "f")]), expected: None };
        for command in functions(&["f"]).into_iter().chain([workflow]) {
            a.replica.propose(CallerName("test".into()), None, command).await.unwrap();
        }
        let pair = (key("f").name, key("g").name);
        for node in [&a, &b] {
            until(node, |state| state.workflow(&key("w")).is_some()).await;
            // Each controller counts half of the runs that suffice.
            for _ in 0..RUNS_MIN / 2 {
                let passing = RunTraffic::default();
                passing.took(pair.0.clone(), &pair.1, 7);
                node.passed.ran(&key("w"), Revision::FIRST, passing);
            }
        }
        let stop = CancellationToken::new();
        let is_known = |it: &MeasuredTraffic| it.passed(&key("w"), Revision::FIRST, &pair) == Some(Bytes(7));
        // Either controller may lead.
        let learned = [&a, &b].map(|node| {
            let limits = ControllerLimits::default().lease;
            let duties = Duties::new(node.replica.clone(), WorkerFleet::new(), limits, node.passed.clone());
            let mut measured = duties.measured.subscribe();
            tokio::spawn(duties.run_until(stop.clone()));
            Box::pin(async move { assert!(measured.wait_for(is_known).await.is_ok()) })
        });
        tokio::time::timeout(WAIT, select_all(learned)).await.expect("a leader asks all of them");
        stop.cancel();
    }
}
