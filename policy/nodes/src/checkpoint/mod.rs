//! The worker's side of checkpoints: it reports its soft state, and the leader keeps it. The core
//! knows the present state and gathers changes. About once a period the core emits batches until
//! all changes are sent, with a single batch in flight.
//!
//! ```text
//!   ModelLoaded, DataStored, Scored, Used, …   activity of the node
//!        │
//!        ▼
//!   WorkerCheckpoint ── Send(batch) ──▶ the leader
//!        ▲
//!        │  Acknowledged      the next batch, or the next period
//!        │  ResyncWanted      everything again, in portions
//!        │  Registered        a new epoch: everything again
//!        └─ (no answer)       the same batch again, after a while or at a new leader
//! ```
//!
//! Data is reported by its id only once it is older than a period, and up to a bound; data beyond the
//! bound is only counted. SLO counts and usage accumulate per epoch. A new epoch starts with the amounts that
//! were not sent in the old epoch, so that usage is never charged twice; amounts that were sent but
//! not acknowledged are waived.
//!
//! Out of scope: the data itself, and which controller leads. The caller sends a batch to the
//! presumed leader, and reports [`Event::Reached`] when that leader changes.

mod holdings;
mod ledger;
#[cfg(test)]
mod load;
mod protocol;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use millrace_types::checkpoint::{SYNC_ITEMS_MAX, encoded};
use millrace_types::{
    Alphas, Bytes, Epoch, FunctionKey, ModelCopy, NodeDelta, SloCounts, SyncBatch, SyncPart, SyncPortion,
    Timestamp, Usage,
};

use self::holdings::DataHoldings;
use self::ledger::{LedgerEntry, SyncLedger, SyncScope};
pub use self::protocol::{Action, Config, Event};
use millrace_core::Core;

/// Interval at which changes are sent, and age at which data is named.
const PERIOD: Duration = Duration::from_secs(1);
/// Time without an answer after which the same batch is sent again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Minimum size limit of a batch in bytes: more than any single item needs.
const BATCH_BYTES_MIN: usize = 1 << 10;

/// A worker's soft state, with the part that the leader knows.
#[derive(Debug, Clone)]
pub struct WorkerCheckpoint {
    config: Config,
    epoch: Option<Epoch>,
    /// Last batch number used in this epoch.
    seq: u64,
    stage: Stage,
    in_flight: Option<InFlight>,
    /// Whether the last batch was cut, so that the next follows the acknowledgement.
    more: bool,
    /// Time at which changes are sent next.
    due: Timestamp,
    models: SyncLedger<ModelCopy, Bytes>,
    data: DataHoldings,
    scores: SyncLedger<FunctionKey, SloCounts>,
    usage: SyncLedger<FunctionKey, Usage>,
    alphas: Alphas,
    alphas_told: Option<Alphas>,
    overflow_told: Option<u64>,
}

#[derive(Debug, Clone)]
struct InFlight {
    batch: Arc<SyncBatch>,
    /// Time at which the batch is sent again.
    again: Timestamp,
}

/// State of the leader's copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Everything has to be sent, from the beginning.
    Resync,
    /// A full sync has begun.
    Syncing,
    /// The leader has everything except for later changes.
    Synced,
}

impl WorkerCheckpoint {
    /// Returns the state of a worker that holds nothing and is not registered. A batch holds at
    /// least one item, even if the config says less.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let items_max = config.items_max.clamp(1, SYNC_ITEMS_MAX);
        let bytes_max = config.bytes_max.max(BATCH_BYTES_MIN);
        Self {
            config: Config { items_max, bytes_max, ..config },
            epoch: None,
            seq: 0,
            stage: Stage::Resync,
            in_flight: None,
            more: false,
            due: Timestamp::ZERO,
            models: SyncLedger::new(),
            data: DataHoldings::new(config.entries_max),
            scores: SyncLedger::new(),
            usage: SyncLedger::new(),
            alphas: Alphas::new(),
            alphas_told: None,
            overflow_told: None,
        }
    }

    /// Returns a function's SLO counts of this epoch. These counts and the placement's base
    /// determine the function's required request count.
    #[must_use]
    pub fn counts(&self, function: &FunctionKey) -> SloCounts {
        self.scores.get(function).copied().unwrap_or_default()
    }

    /// Returns whether the leader has acknowledged everything.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.stage == Stage::Synced && self.in_flight.is_none() && !self.has_changes()
    }

    /// Returns the complete state as one delta.
    #[must_use]
    pub fn everything(&self) -> NodeDelta {
        let pairs = |(key, value): (&FunctionKey, &SloCounts)| (key.clone(), *value);
        NodeDelta {
            models: self.models.iter().map(|(copy, bytes)| (*copy, *bytes)).collect(),
            entries: self.data.named.iter().map(|(id, bytes)| (id.clone(), *bytes)).collect(),
            slo: self.scores.iter().map(pairs).collect(),
            usage: self.usage.iter().map(|(key, usage)| (key.clone(), *usage)).collect(),
            alphas: Some(self.alphas.clone()),
            overflow: Some(self.data.overflow()),
            ..NodeDelta::default()
        }
    }

    fn note(&mut self, now: Timestamp, event: Event) {
        match event {
            Event::ModelLoaded { copy, bytes } => {
                self.models.set(copy, bytes);
            }
            Event::ModelDropped { copy } => {
                self.models.unset(&copy);
            }
            Event::DataStored { id, bytes } => {
                self.data.store(now, id, bytes);
            }
            Event::DataDropped { id } => self.data.drop(&id),
            Event::Scored { function, counts } => {
                let sum = self.counts(&function).plus(counts);
                self.scores.set(function, sum);
            }
            Event::Used { function, usage } => {
                let sum = self.usage.get(&function).copied().unwrap_or_default().plus(usage);
                self.usage.set(function, sum);
            }
            Event::FunctionDeleted { function } => self.scores.forget(&function),
            Event::AlphasSet(alphas) => self.alphas = alphas,
            Event::Registered { epoch } => self.register(now, epoch),
            Event::Reached => self.hurry(now),
            Event::Acknowledged { epoch, seq } => self.acknowledge(epoch, seq),
            Event::ResyncWanted { epoch, seq, last } => self.resync(now, epoch, seq, last),
            Event::Flush => self.due = now,
            Event::Tick => {}
        }
    }

    fn register(&mut self, now: Timestamp, epoch: Epoch) {
        if self.epoch == Some(epoch) {
            return;
        }
        self.epoch = Some(epoch);
        self.seq = 0;
        self.in_flight = None;
        self.scores.rebase(|counts, told| Some(counts.since(*told)).filter(|it| *it != SloCounts::default()));
        self.usage.rebase(|usage, told| Some(usage.since(*told)).filter(|it| *it != Usage::NONE));
        self.stage = Stage::Resync;
        self.due = now;
    }

    fn hurry(&mut self, now: Timestamp) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.again = now;
        }
    }

    /// Clears the batch in flight and returns true, if the answer is about that batch.
    fn answered(&mut self, epoch: Epoch, is: impl Fn(u64) -> bool) -> bool {
        let answered =
            self.epoch == Some(epoch) && self.in_flight.as_ref().is_some_and(|it| is(it.batch.seq));
        if answered {
            self.in_flight = None;
        }
        answered
    }

    fn acknowledge(&mut self, epoch: Epoch, seq: u64) {
        self.answered(epoch, |in_flight| in_flight <= seq);
    }

    fn resync(&mut self, now: Timestamp, epoch: Epoch, seq: u64, last: u64) {
        // A late answer about an older batch is ignored, because its resync is under way.
        if self.answered(epoch, |in_flight| in_flight == seq) {
            self.seq = self.seq.max(last);
            self.stage = Stage::Resync;
            self.due = now;
        }
    }

    /// Sends a batch, or repeats the batch in flight, when due.
    fn advance(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(epoch) = self.epoch else { return };
        if let Some(in_flight) = &mut self.in_flight {
            if in_flight.again <= now {
                in_flight.again = now + PATIENCE;
                actions.push(Action::Send(in_flight.batch.clone()));
            }
            return;
        }
        if self.due <= now {
            self.due = now + PERIOD;
            self.data.mature(now, PERIOD);
        } else if !self.more {
            return;
        }
        if let Some((part, delta)) = self.next() {
            self.seq += 1;
            let batch = Arc::new(SyncBatch { epoch, seq: self.seq, part, delta });
            self.in_flight = Some(InFlight { batch: batch.clone(), again: now + PATIENCE });
            actions.push(Action::Send(batch));
        }
    }

    /// Returns the next batch, or `None` if there is nothing to send.
    fn next(&mut self) -> Option<(SyncPart, NodeDelta)> {
        let begins = self.stage == Stage::Resync;
        if begins {
            self.begin_again();
        }
        let source = if self.stage == Stage::Synced { SyncScope::Changes } else { SyncScope::Everything };
        let delta = self.fill(source);
        self.more = self.has_more(source);
        if source == SyncScope::Changes {
            return (!delta.is_empty()).then_some((SyncPart::Delta, delta));
        }
        let portion = match (begins, self.more) {
            (true, false) => SyncPortion::Only,
            (true, true) => SyncPortion::First,
            (false, true) => SyncPortion::Middle,
            (false, false) => SyncPortion::Last,
        };
        if !self.more {
            self.stage = Stage::Synced;
            // Changes during the full sync follow at once.
            self.more = self.has_changes();
        }
        Some((SyncPart::Full(portion), delta))
    }

    fn begin_again(&mut self) {
        self.models.begin_again();
        self.data.named.begin_again();
        self.scores.begin_again();
        self.usage.begin_again();
        self.alphas_told = None;
        self.overflow_told = None;
        self.stage = Stage::Syncing;
    }

    fn has_more(&self, source: SyncScope) -> bool {
        self.models.peek(source).is_some()
            || self.data.named.peek(source).is_some()
            || self.scores.peek(source).is_some()
            || self.usage.peek(source).is_some()
    }

    fn has_changes(&self) -> bool {
        self.has_more(SyncScope::Changes)
            || self.alphas_told.as_ref() != Some(&self.alphas)
            || self.overflow_told != Some(self.data.overflow())
    }

    fn fill(&mut self, source: SyncScope) -> NodeDelta {
        let mut delta = NodeDelta::default();
        if self.alphas_told.as_ref() != Some(&self.alphas) {
            self.alphas_told = Some(self.alphas.clone());
            delta.alphas = self.alphas_told.clone();
        }
        if self.overflow_told != Some(self.data.overflow()) {
            self.overflow_told = Some(self.data.overflow());
            delta.overflow = self.overflow_told;
        }
        let mut room = BatchRoom { items: self.config.items_max, bytes: self.config.bytes_max };
        room.spend(0, encoded::around());
        let model = |_: &ModelCopy| encoded::model();
        room.fill(&mut self.models, source, model, |told| match told {
            LedgerEntry::There(copy, bytes) => delta.models.push((copy, bytes)),
            LedgerEntry::Gone(copy) => delta.models_gone.push(copy),
        });
        room.fill(&mut self.data.named, source, encoded::entry, |told| match told {
            LedgerEntry::There(id, bytes) => delta.entries.push((id, bytes)),
            LedgerEntry::Gone(id) => delta.entries_gone.push(id),
        });
        room.fill(&mut self.scores, source, encoded::score, |told| {
            if let LedgerEntry::There(function, counts) = told {
                delta.slo.push((function, counts));
            }
        });
        room.fill(&mut self.usage, source, encoded::usage, |told| {
            if let LedgerEntry::There(function, usage) = told {
                delta.usage.push((function, usage));
            }
        });
        delta
    }
}

impl Core for WorkerCheckpoint {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.note(now, event);
        self.advance(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.epoch?;
        match &self.in_flight {
            Some(in_flight) => Some(in_flight.again),
            None => {
                let work = self.stage != Stage::Synced || self.has_changes() || self.data.is_growing();
                work.then_some(self.due)
            }
        }
    }
}

/// Remaining room of a batch.
#[derive(Debug, Clone, Copy)]
struct BatchRoom {
    items: usize,
    bytes: usize,
}

impl BatchRoom {
    fn spend(&mut self, items: usize, bytes: usize) {
        self.items -= items;
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Moves items into the batch until the batch is full.
    fn fill<K: Ord + Clone, V: Clone + PartialEq>(
        &mut self,
        ledger: &mut SyncLedger<K, V>,
        source: SyncScope,
        size: impl Fn(&K) -> usize,
        mut put: impl FnMut(LedgerEntry<K, V>),
    ) {
        while self.items > 0
            && let Some(bytes) = ledger.peek(source).map(&size)
            && bytes <= self.bytes
            && let Some(told) = ledger.take(source)
        {
            self.spend(1, bytes);
            put(told);
        }
    }
}
