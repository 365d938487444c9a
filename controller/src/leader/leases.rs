//! Drives the leader's lease table: signs of life renew leases, and expired leases end registrations. A
//! lost worker that is heard again is registered again under a new epoch.
//!
//! Only a leader with an open stream of the worker registers it again. Otherwise, a worker that other
//! controllers hear and the leader does not would be lost and registered again forever.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{NodeStatus, State};
use millrace_nodes::lease::{Leases, NodeRegistration};
use millrace_types::{NodeName, Timestamp};
use tokio::task::JoinSet;

use super::duties::Duties;
use crate::fleet::{AttachedWorker, Workers, registration};

/// Proposals of this task in progress at a time. Further proposals wait for the next look.
const PROPOSALS_MAX: usize = 64;

/// Keeps the leases while polled: as long as this controller leads in that term.
pub(super) async fn keep(duties: &Duties, term: u64) {
    let mut changes = duties.replica.changes();
    let mut fleet = duties.fleet.changes();
    let mut keeper = Keeper::elected(duties, term);
    loop {
        let wake = keeper.look();
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            // Wake on fleet changes, so that a worker that attaches and soon detaches is seen.
            changed = fleet.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(wake) => {}
            Some(ended) = keeper.under_way.join_next() => keeper.ended(ended.ok().flatten()),
        }
    }
}

struct Keeper<'a> {
    duties: &'a Duties,
    term: u64,
    leases: Leases,
    /// The time of this controller's election. Earlier signs of life do not count, and every node
    /// starts with a full lease.
    elected: Timestamp,
    /// The last counted sign of life of each attached worker. A single time for all workers would miss
    /// signs of life that arrive during a look.
    heard: BTreeMap<NodeName, Timestamp>,
    /// The workers attached at the last look. Signs of life between that look and the end of a worker's
    /// stream count too.
    attached: Workers,
    /// Workers whose new registration is in progress.
    returning: BTreeSet<NodeName>,
    /// Proposals in progress. A proposal that registers a worker again ends with the worker's name.
    under_way: JoinSet<Option<NodeName>>,
    /// The state's version at the last look.
    seen: Option<u64>,
}

impl<'a> Keeper<'a> {
    fn elected(duties: &'a Duties, term: u64) -> Self {
        let now = duties.fleet.now();
        let mut leases = Leases::new(duties.limits);
        leases.elected(now, live(&duties.replica.state()));
        let heard = BTreeMap::new();
        let attached = duties.fleet.workers();
        let returning = BTreeSet::new();
        let under_way = JoinSet::new();
        Self { duties, term, leases, elected: now, heard, attached, returning, under_way, seen: None }
    }

    /// Updates the leases and carries out the consequences. Returns the time until the next lease
    /// event.
    fn look(&mut self) -> Duration {
        let state = self.duties.replica.state();
        let now = self.duties.fleet.now();
        if self.seen.replace(state.version()) != Some(state.version()) {
            self.follow(&state, now);
        }
        self.hear(&state);
        let verdict = self.leases.tick(now);
        if let Some(stood) = verdict.stalled {
            tracing::warn!(?stood, "this controller was stalled: granting every node a full lease again");
        }
        for member in &verdict.fenced {
            tracing::warn!(node = %member.node, epoch = %member.epoch, "node is silent: refusing its checkpoints until the node is heard again");
        }
        for member in verdict.lost {
            self.lose(&state, member);
        }
        self.publish(&state);
        let wake = self.leases.next_wake().unwrap_or(now);
        wake.since(self.duties.fleet.now())
    }

    /// Follows new and ended registrations.
    fn follow(&mut self, state: &State, now: Timestamp) {
        for node in state.nodes() {
            match node.status {
                NodeStatus::Live => {
                    let member = NodeRegistration { node: node.name.clone(), epoch: node.epoch };
                    self.leases.registered(now, member);
                }
                NodeStatus::Lost => self.leases.remove_node(&node.name, node.epoch),
            }
        }
    }

    fn hear(&mut self, state: &State) {
        let workers = self.duties.fleet.workers();
        let before = std::mem::replace(&mut self.attached, workers.clone());
        let counted = std::mem::take(&mut self.heard);
        let elected = self.elected;
        let last = |worker: &AttachedWorker| counted.get(&worker.name).copied().unwrap_or(elected);
        for worker in before.values().filter(|worker| !is_in(&workers, worker)) {
            let heard = worker.heard();
            if heard > last(worker) {
                self.leases.record_sign_of_life(&worker.name, worker.epoch(), heard);
            }
        }
        for worker in workers.values() {
            let heard = worker.heard();
            let last = last(worker);
            self.heard.insert(worker.name.clone(), heard.max(last));
            if heard <= last {
                continue;
            }
            self.leases.record_sign_of_life(&worker.name, worker.epoch(), heard);
            if state.node(&worker.name).is_none_or(|node| node.status == NodeStatus::Lost) {
                self.take_in_again(worker);
            }
        }
    }

    fn take_in_again(&mut self, worker: &Arc<AttachedWorker>) {
        if self.under_way.len() >= PROPOSALS_MAX || !self.returning.insert(worker.name.clone()) {
            return;
        }
        tracing::info!(worker = %worker.name, epoch = %worker.epoch(), "worker is back: registering it again");
        let replica = self.duties.replica.clone();
        let worker = worker.clone();
        self.under_way.spawn(async move {
            let seen = worker.epoch();
            if let Err(failure) = registration::register(&replica, &worker.name, &worker.hello, seen).await {
                tracing::warn!(worker = %worker.name, error = failure.message, "cannot register a worker that is back");
            }
            Some(worker.name.clone())
        });
    }

    fn lose(&mut self, state: &State, member: NodeRegistration) {
        let node = state.node(&member.node);
        if node.is_none_or(|node| node.epoch != member.epoch) {
            // The registration has ended already, and the node may be removed.
            self.leases.remove_node(&member.node, member.epoch);
            return;
        }
        if self.under_way.len() >= PROPOSALS_MAX {
            // The lease table names this member again after another lease.
            return;
        }
        tracing::warn!(node = %member.node, epoch = %member.epoch, "node is lost: placing its functions on other nodes");
        let replica = self.duties.replica.clone();
        let term = self.term;
        self.under_way.spawn(async move {
            let node = member.node.clone();
            if let Err(failure) = registration::declare_lost(&replica, term, member).await {
                tracing::warn!(%node, error = failure.message, "cannot commit the loss of a node yet");
            }
            None
        });
    }

    /// Handles the end of a proposal. A worker without a new registration gets another attempt at its
    /// next sign of life.
    fn ended(&mut self, returning: Option<NodeName>) {
        if let Some(name) = returning {
            self.returning.remove(&name);
        }
    }

    fn publish(&self, state: &State) {
        let lease_states = live(state).map(|member| {
            let lease_state = self.leases.lease_state(&member.node, member.epoch);
            (member.node, lease_state)
        });
        let next = lease_states.collect();
        self.duties.lease_states.send_if_modified(|last| {
            let news = **last != next;
            if news {
                *last = Arc::new(next);
            }
            news
        });
    }
}

fn is_in(workers: &Workers, worker: &Arc<AttachedWorker>) -> bool {
    workers.get(&worker.name).is_some_and(|it| Arc::ptr_eq(it, worker))
}

fn live(state: &State) -> impl Iterator<Item = NodeRegistration> {
    let live = state.nodes().filter(|node| node.status == NodeStatus::Live);
    live.map(|node| NodeRegistration { node: node.name.clone(), epoch: node.epoch })
}
