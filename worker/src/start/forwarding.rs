//! Passes SLO counts, tenants' caps, slices, the policy and committed alphas from the control streams to the
//! node, where the queue depends on all of these.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::control::checkpoint::SloScores;
use crate::desired_state::DesiredState;
use crate::handle::NodeHandle;

pub(super) fn start(
    scores: watch::Receiver<SloScores>,
    desired: watch::Receiver<DesiredState>,
    node: &NodeHandle,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(tell_scores(scores, node.clone()));
    let scheduler = node.clone();
    let queue = node.clone();
    tasks.spawn(tell(desired.clone(), |it| it.policy, move |wanted| scheduler.set_policy(wanted)));
    let levels = node.clone();
    tasks.spawn(tell(desired.clone(), |it| it.alphas.clone(), move |alphas| levels.begin_with(alphas)));
    tasks.spawn(tell(desired.clone(), |it| Arc::clone(&it.quotas), move |quotas| queue.set_quotas(quotas)));
    let slices = node.clone();
    tasks.spawn(tell(desired, |it| Arc::clone(&it.slices), move |wanted| slices.set_slices(wanted)));
    tasks
}

/// Passes on a part of the desired state whenever the part changes.
async fn tell<T: Clone + Default + PartialEq>(
    mut desired: watch::Receiver<DesiredState>,
    part: impl Fn(&DesiredState) -> T,
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
async fn tell_scores(mut scores: watch::Receiver<SloScores>, node: NodeHandle) {
    while scores.changed().await.is_ok() {
        node.set_slo_scores(Arc::clone(&scores.borrow_and_update()));
    }
}
