//! Checkpoints: about once a second the worker sends the leader its soft state, so that the state
//! outlives the node. Soft state is the models and their tiers, data, scores and usage.
//! [`millrace_nodes::checkpoint`] decides about contents and times. This module observes the node and
//! routes the batches.
//!
//! ```text
//! node, host tier ─ look ─┐                                  ┌─► outbox ─► the leader's stream
//! data plane ─ changes ───┼─► nodes::checkpoint ── batch ───┤
//! streams ─ epochs, leaders, acknowledgements ─► ▲           └─► nowhere, without a leader
//! ```
//!
//! One batch is in transit at a time, so nothing queues here. The core repeats a batch without a
//! leader or an acknowledgement.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_core::Core as _;
use millrace_nodes::checkpoint::{Action, Config, Event, WorkerCheckpoint};
use millrace_proto::worker as wire;
use millrace_types::{Epoch, FunctionKey, SloBase, SyncBatch};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;

use self::observe::{NodeObservation, ReportThreshold};
use super::leaders::{LeaderClaims, StreamId};
use crate::clock::Clock;
use crate::desired_state::{DesiredState, PlacedFunction};
use crate::handle::NodeHandle;
use crate::registration::{NodeEpochStore, NodeEpochs};

pub use crate::slo_scores::SloScores;

mod observe;

/// Maximum number of remembered creation times of functions, beside those placed here. The time
/// distinguishes a returning function from another function of the same name.
const CREATED_MAX: usize = 20_000;
/// Interval between observations of the node.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of index changes handled at once.
const CHANGES_AT_ONCE: usize = 256;

/// An encoded batch, and its destination.
#[derive(Debug, Clone, Default)]
pub(super) struct CheckpointOutbox {
    pub(super) to: Option<StreamId>,
    pub(super) batch: prost::bytes::Bytes,
}

/// The inputs and outputs of the checkpoint task.
pub(super) struct CheckpointTaskConfig {
    pub(super) node: NodeHandle,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    pub(super) desired: watch::Receiver<DesiredState>,
    /// Changes of the node's data, from the data plane.
    pub(super) changes: mpsc::Receiver<Event>,
    pub(super) registrations: NodeEpochStore,
    pub(super) leaders: watch::Receiver<LeaderClaims>,
    pub(super) answers: mpsc::Receiver<wire::CheckpointAck>,
    /// Requests to be notified once the leader has acknowledged everything.
    pub(super) flushes: mpsc::Receiver<oneshot::Sender<()>>,
    pub(super) outbox: watch::Sender<CheckpointOutbox>,
    pub(super) scores: watch::Sender<SloScores>,
}

impl CheckpointTaskConfig {
    /// Sends checkpoints until the future is dropped.
    pub(super) async fn run(self) {
        let registration = self.registrations.subscribe();
        let task = CheckpointTask {
            from: self,
            registration,
            core: WorkerCheckpoint::new(Config::default()),
            seen: NodeObservation::default(),
            leader: None,
            sent: 0,
            created: BTreeMap::new(),
            flushing: Vec::new(),
        };
        task.run().await;
    }
}

struct CheckpointTask {
    from: CheckpointTaskConfig,
    registration: watch::Receiver<NodeEpochs>,
    core: WorkerCheckpoint,
    seen: NodeObservation,
    leader: Option<StreamId>,
    /// Number of the last batch.
    sent: u64,
    /// Creation time of each function that may have counts, in Unix milliseconds.
    created: BTreeMap<FunctionKey, u64>,
    flushing: Vec<oneshot::Sender<()>>,
}

impl CheckpointTask {
    async fn run(mut self) {
        let mut look = tokio::time::interval(LOOK_PERIOD);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.registration.mark_changed();
        self.from.leaders.mark_changed();
        let mut changes = Vec::with_capacity(CHANGES_AT_ONCE);
        loop {
            let wake = self.until_wake();
            tokio::select! {
                // Changes come last because changes may never cease. Changes also carry the core's
                // clock on, so the timer is not starved.
                biased;
                Some(answer) = self.from.answers.recv() => self.on_acknowledgement(&answer),
                Ok(()) = self.registration.changed() => self.registered(),
                Ok(()) = self.from.leaders.changed() => self.on_leader_change(),
                Some(told) = self.from.flushes.recv() => self.flush(told).await,
                _ = look.tick() => self.look(ReportThreshold::Usual).await,
                () = wake => self.handle_event(Event::Tick),
                1.. = self.from.changes.recv_many(&mut changes, CHANGES_AT_ONCE) => {
                    changes.drain(..).for_each(|change| self.change(change));
                }
            }
            if !self.flushing.is_empty() && self.core.is_settled() {
                // The requester may have given up.
                self.flushing.drain(..).for_each(|told| told.send(()).unwrap_or_default());
            }
        }
    }

    fn until_wake(&self) -> impl Future<Output = ()> + use<> {
        let clock = &self.from.clock;
        let span = self.core.next_wake().map(|at| clock.sleep_for(at.since(clock.now())));
        async move {
            match span {
                Some(span) => tokio::time::sleep(span).await,
                None => std::future::pending().await,
            }
        }
    }

    fn handle_event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.core.on_event(self.from.clock.now(), event, &mut actions);
        for Action::Send(batch) in actions {
            self.send(&batch);
        }
    }

    fn send(&mut self, batch: &SyncBatch) {
        self.sent = batch.seq;
        let Some(to) = self.leader else { return };
        tracing::debug!(epoch = batch.epoch.0, seq = batch.seq, items = batch.delta.len(), "checkpoint");
        let batch = rmp_serde::to_vec_named(batch).expect("plain data with string or integer keys encodes");
        self.from.outbox.send_replace(CheckpointOutbox { to: Some(to), batch: batch.into() });
    }

    fn on_acknowledgement(&mut self, answer: &wire::CheckpointAck) {
        let epoch = Epoch(answer.epoch);
        let last = answer.seq;
        self.handle_event(if answer.full_wanted {
            tracing::info!(epoch = epoch.0, last, "the leader lacks a checkpoint: sending a full one");
            Event::ResyncWanted { epoch, seq: self.sent, last }
        } else {
            Event::Acknowledged { epoch, seq: last }
        });
    }

    fn registered(&mut self) {
        let registration = *self.registration.borrow_and_update();
        if let Some(epoch) = registration.current {
            self.handle_event(Event::Registered { epoch });
            self.publish();
        }
    }

    fn on_leader_change(&mut self) {
        self.leader = self.from.leaders.borrow_and_update().leader();
        if self.leader.is_some() {
            self.handle_event(Event::Reached);
        }
    }

    fn change(&mut self, change: Event) {
        if let Event::DataStored { id, .. } = &change {
            self.from.registrations.observe(id.epoch);
        }
        self.handle_event(change);
    }

    async fn look(&mut self, look: ReportThreshold) {
        let deleted = self.deleted();
        let snapshot = self.from.node.snapshot().await;
        let events = self.seen.look(look, &snapshot, &self.from.models.borrow());
        // Counts since the last look belong to the deleted function of the same name.
        let stale =
            |event: &Event| matches!(event, Event::Scored { function, .. } if deleted.contains(function));
        events.into_iter().filter(|event| !stale(event)).for_each(|event| self.handle_event(event));
        deleted.into_iter().for_each(|function| self.handle_event(Event::FunctionDeleted { function }));
        self.publish();
    }

    /// Returns the functions that were deleted and created again since the last look. The new
    /// function does not inherit the counts of the old function, and the leader dropped the old
    /// counts with the old function.
    fn deleted(&mut self) -> BTreeSet<FunctionKey> {
        let created = |it: &PlacedFunction| (it.key.function.clone(), it.created_at_ms);
        let desired: BTreeMap<_, _> = self.from.desired.borrow().functions.iter().map(created).collect();
        if self.created.len() > CREATED_MAX {
            self.created.retain(|function, _| desired.contains_key(function));
        }
        let again = |(function, created): (FunctionKey, u64)| {
            let before = self.created.insert(function.clone(), created);
            before.is_some_and(|before| before != created).then_some(function)
        };
        desired.into_iter().filter_map(again).collect()
    }

    async fn flush(&mut self, told: oneshot::Sender<()>) {
        self.look(ReportThreshold::Last).await;
        // Without a leader the request is dropped, which tells the requester that no leader is
        // known.
        if self.leader.is_some() {
            self.flushing.push(told);
            self.handle_event(Event::Flush);
        }
    }

    fn publish(&self) {
        let desired = self.from.desired.borrow();
        let bases = desired.functions.iter().map(|it| (it.key.function.clone(), it.slo_base));
        let score = |(function, base): (FunctionKey, SloBase)| {
            let counts = base.effective(self.core.counts(&function));
            (function, counts)
        };
        let scores: BTreeMap<_, _> = bases.map(score).collect();
        self.from.scores.send_if_modified(|last| {
            let differs = **last != scores;
            if differs {
                *last = Arc::new(scores);
            }
            differs
        });
    }
}
