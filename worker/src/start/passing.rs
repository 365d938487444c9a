//! Passes SLO counts, tenants' caps and the policy from the control streams to the node, where the
//! queue depends on them.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::control::checkpoint::Scores;
use crate::control::desired::Desired;
use crate::handle::NodeHandle;

pub(super) fn start(
    scores: watch::Receiver<Scores>,
    desired: watch::Receiver<Desired>,
    node: &NodeHandle,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(tell_scores(scores, node.clone()));
    let scheduler = node.clone();
    let queue = node.clone();
    tasks.spawn(tell(desired.clone(), |it| it.policy, move |wanted| scheduler.set_policy(wanted)));
    tasks.spawn(tell(desired, |it| Arc::clone(&it.quotas), move |quotas| queue.cap(quotas)));
    tasks
}

/// Passes on a part of the desired state whenever the part changes.
async fn tell<T: Clone + Default + PartialEq>(
    mut desired: watch::Receiver<Desired>,
    part: impl Fn(&Desired) -> T,
    pass_on: impl Fn(T),
) {
    let mut told = T::default();
    loop {
        let wanted = part(&desired.borrow_and_update());
        if wanted != told {
            pass_on(wanted.clone());
            told = wanted;
        }
        if desired.changed().await.is_err() {
            return;
        }
    }
}

/// Passes on the functions' SLO counts, about once a second.
async fn tell_scores(mut scores: watch::Receiver<Scores>, node: NodeHandle) {
    while scores.changed().await.is_ok() {
        node.tell_scores(Arc::clone(&scores.borrow_and_update()));
    }
}
