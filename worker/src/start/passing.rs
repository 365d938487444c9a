//! Passes on to the node what the control streams learned and its queue depends on.

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
    let (scheduler, queue) = (node.clone(), node.clone());
    tasks.spawn(tell(desired.clone(), |it| it.policy, move |wanted| scheduler.set_policy(wanted)));
    tasks.spawn(tell(desired, |it| Arc::clone(&it.quotas), move |quotas| queue.cap(quotas)));
    tasks
}

/// Passes on a part of what is desired, whenever that is something else.
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

/// Passes on what functions go by, about once a second.
async fn tell_scores(mut scores: watch::Receiver<Scores>, node: NodeHandle) {
    while scores.changed().await.is_ok() {
        node.tell_scores(Arc::clone(&scores.borrow_and_update()));
    }
}
