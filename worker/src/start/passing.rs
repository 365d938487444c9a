//! Passes on to the node what the control streams learned and its queue depends on.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::control::checkpoint::Scores;
use crate::control::desired::Desired;
use crate::handle::NodeHandle;
use crate::policy::Wanted;

pub(super) fn start(
    scores: watch::Receiver<Scores>,
    desired: watch::Receiver<Desired>,
    node: &NodeHandle,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(tell_scores(scores, node.clone()));
    tasks.spawn(tell_policy(desired.clone(), node.clone()));
    tasks.spawn(tell_quotas(desired, node.clone()));
    tasks
}

/// Passes on how the node schedules, whenever that is something else.
async fn tell_policy(mut desired: watch::Receiver<Desired>, node: NodeHandle) {
    let mut told = Wanted::default();
    loop {
        let wanted = desired.borrow_and_update().policy;
        if wanted != told {
            node.set_policy(wanted);
            told = wanted;
        }
        if desired.changed().await.is_err() {
            return;
        }
    }
}

/// Passes on what tenants may use, whenever that is something else.
async fn tell_quotas(mut desired: watch::Receiver<Desired>, node: NodeHandle) {
    let mut told = Arc::default();
    loop {
        let quotas = Arc::clone(&desired.borrow_and_update().quotas);
        if quotas != told {
            node.cap(Arc::clone(&quotas));
            told = quotas;
        }
        if desired.changed().await.is_err() {
            return;
        }
    }
}

/// Passes on what functions go by, about once a second.
async fn tell_scores(mut scores: watch::Receiver<Scores>, node: NodeHandle) {
    while scores.changed().await.is_ok() {
        node.tell_scores(Arc::clone(&scores.borrow_and_update()));
    }
}
