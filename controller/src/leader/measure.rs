//! Asks every controller how much functions passed to each other in the runs of workflows that it drives,
//! now and then while this one leads (D19). None of it is in Raft: it is a guide, and learned again.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use millrace_policy::placement::Tally;

use super::Duties;
use crate::passed::ask;
use crate::raft::{Lane, Peer};

/// How often they are asked.
const ASK_EVERY: Duration = Duration::from_secs(10);

/// Asks for as long as it is polled: while this controller leads.
pub(super) async fn keep(duties: &Duties) {
    loop {
        look(duties).await;
        tokio::time::sleep(ASK_EVERY).await;
    }
}

async fn look(duties: &Duties) {
    let others = duties.replica.others(Lane::Requests);
    let own = duties.replica.id().0;
    let controllers: BTreeSet<u64> = others.iter().map(Peer::id).chain([own]).collect();
    let asked = join_all(others.into_iter().map(ask)).await;
    let state = duties.replica.state();
    // Who does not answer is asked again the next time: nothing of what it counts is lost.
    let told = asked.into_iter().filter_map(|(id, told)| Some((id, told?)));
    let told = told.chain([(own, duties.passed.told(&state))]);
    duties.measured.send_modify(|measured| {
        for (controller, told) in told {
            measured.take(controller, told.into_iter().map(Tally::from).collect());
        }
        measured.retain(&controllers, |workflow| Some(state.workflow(workflow)?.generation));
    });
}
