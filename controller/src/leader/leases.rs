//! The leader's lease table, driven: signs of life go in, silence ends registrations. A worker that
//! was declared lost and is heard again is taken in again, under a new epoch.
//!
//! Only the leader takes it in again while its stream is open. A worker that other controllers hear
//! and the leader does not would otherwise be lost and taken in for ever.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{NodeStatus, State};
use millrace_policy::lease::{Leases, Member};
use millrace_types::{NodeName, Timestamp};
use tokio::task::JoinSet;

use super::Duties;
use crate::fleet::{Worker, Workers, registration};

/// Proposals of one kind under way at a time. What is beyond comes with the next look.
const PROPOSALS_MAX: usize = 64;

/// Judges who is alive for as long as it is polled: while this controller leads, in that term.
pub(super) async fn keep(duties: &Duties, term: u64) {
    let mut changes = duties.replica.changes();
    let mut fleet = duties.fleet.changes();
    let mut keeper = Keeper::elected(duties, term);
    loop {
        let wake = keeper.look();
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            // So that whoever comes is seen before it goes.
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
    /// When it was elected: what was heard before counts for nothing, everyone has a full lease.
    elected: Timestamp,
    /// The last sign of life that was counted of each attached worker. One time for all would miss
    /// what is heard at the moment of a look, behind its back.
    heard: BTreeMap<NodeName, Timestamp>,
    /// Who was attached at the last look. What a worker said between that and the end of its stream
    /// counts too.
    attached: Workers,
    /// Workers that are being taken in again.
    returning: BTreeSet<NodeName>,
    /// Proposals. One that takes a worker in again ends with its name.
    under_way: JoinSet<Option<NodeName>>,
    /// The state's version at the last look.
    seen: Option<u64>,
}

impl<'a> Keeper<'a> {
    fn elected(duties: &'a Duties, term: u64) -> Self {
        let now = duties.fleet.now();
        let mut leases = Leases::new(duties.limits);
        leases.elected(now, live(&duties.replica.state()));
        let (returning, under_way) = (BTreeSet::new(), JoinSet::new());
        let (heard, attached) = (BTreeMap::new(), duties.fleet.workers());
        Self { duties, term, leases, elected: now, heard, attached, returning, under_way, seen: None }
    }

    /// Takes in what happened, and carries out what follows. Says how long nothing else will.
    fn look(&mut self) -> Duration {
        let state = self.duties.replica.state();
        let now = self.duties.fleet.now();
        if self.seen.replace(state.version()) != Some(state.version()) {
            self.follow(&state, now);
        }
        self.hear(&state);
        let verdict = self.leases.tick(now);
        if let Some(stood) = verdict.stalled {
            tracing::warn!(?stood, "this controller stood still: every node has a full lease again");
        }
        for member in &verdict.fenced {
            tracing::warn!(node = %member.node, epoch = %member.epoch, "node is silent: its checkpoints are not taken until it is heard");
        }
        for member in verdict.lost {
            self.lose(&state, member);
        }
        self.publish(&state);
        let wake = self.leases.next_wake().unwrap_or(now);
        wake.since(self.duties.fleet.now())
    }

    /// Registrations that were committed, and those that are over.
    fn follow(&mut self, state: &State, now: Timestamp) {
        for node in state.nodes() {
            match node.status {
                NodeStatus::Live => {
                    let member = Member { node: node.name.clone(), epoch: node.epoch };
                    self.leases.registered(now, member);
                }
                NodeStatus::Lost => self.leases.gone(&node.name, node.epoch),
            }
        }
    }

    fn hear(&mut self, state: &State) {
        let workers = self.duties.fleet.workers();
        let before = std::mem::replace(&mut self.attached, workers.clone());
        let counted = std::mem::take(&mut self.heard);
        let elected = self.elected;
        let last = |worker: &Worker| counted.get(&worker.name).copied().unwrap_or(elected);
        for worker in before.values().filter(|worker| !is_in(&workers, worker)) {
            let heard = worker.heard();
            if heard > last(worker) {
                self.leases.heard(&worker.name, worker.epoch(), heard);
            }
        }
        for worker in workers.values() {
            let (heard, last) = (worker.heard(), last(worker));
            self.heard.insert(worker.name.clone(), heard.max(last));
            if heard <= last {
                continue;
            }
            self.leases.heard(&worker.name, worker.epoch(), heard);
            if state.node(&worker.name).is_none_or(|node| node.status == NodeStatus::Lost) {
                self.take_in_again(worker);
            }
        }
    }

    fn take_in_again(&mut self, worker: &Arc<Worker>) {
        if self.under_way.len() >= PROPOSALS_MAX || !self.returning.insert(worker.name.clone()) {
            return;
        }
        tracing::info!(worker = %worker.name, epoch = %worker.epoch(), "worker is back: it is taken in again");
        let (replica, worker) = (self.duties.replica.clone(), worker.clone());
        self.under_way.spawn(async move {
            let seen = worker.epoch();
            if let Err(failure) = registration::register(&replica, &worker.name, &worker.hello, seen).await {
                tracing::warn!(worker = %worker.name, error = failure.message, "a worker that is back was not taken in");
            }
            Some(worker.name.clone())
        });
    }

    fn lose(&mut self, state: &State, member: Member) {
        let node = state.node(&member.node);
        if node.is_none_or(|node| node.epoch != member.epoch) {
            // Over already, and perhaps forgotten.
            self.leases.gone(&member.node, member.epoch);
            return;
        }
        if self.under_way.len() >= PROPOSALS_MAX {
            // Named again a lease later.
            return;
        }
        tracing::warn!(node = %member.node, epoch = %member.epoch, "node is lost: its functions are placed elsewhere");
        let (replica, term) = (self.duties.replica.clone(), self.term);
        self.under_way.spawn(async move {
            let node = member.node.clone();
            if let Err(failure) = registration::declare_lost(&replica, term, member).await {
                tracing::warn!(%node, error = failure.message, "the loss of a node is not committed yet");
            }
            None
        });
    }

    /// A proposal was answered. A worker that was not taken in is tried for when it is heard next.
    fn ended(&mut self, returning: Option<NodeName>) {
        if let Some(name) = returning {
            self.returning.remove(&name);
        }
    }

    fn publish(&self, state: &State) {
        let standings = live(state).map(|member| {
            let standing = self.leases.standing(&member.node, member.epoch);
            (member.node, standing)
        });
        let next = standings.collect();
        self.duties.standings.send_if_modified(|last| {
            let news = **last != next;
            if news {
                *last = Arc::new(next);
            }
            news
        });
    }
}

fn is_in(workers: &Workers, worker: &Arc<Worker>) -> bool {
    workers.get(&worker.name).is_some_and(|it| Arc::ptr_eq(it, worker))
}

fn live(state: &State) -> impl Iterator<Item = Member> {
    let live = state.nodes().filter(|node| node.status == NodeStatus::Live);
    live.map(|node| Member { node: node.name.clone(), epoch: node.epoch })
}
