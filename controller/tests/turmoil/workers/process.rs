//! The state of a process over all streams, and the process's own actions.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::Core as _;
use millrace_nodes::checkpoint::{Action, Config, Event, WorkerCheckpoint};
use millrace_proto::parts::{DesiredItem, ItemSet};
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{
    Bytes, DataId, Digest, Epoch, GpuIndex, MemoryTier, ModelCopy, NodeName, SloCounts, SyncBatch, Timestamp,
    Usage,
};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::group::{GPU_MEMORY, HOST_MEMORY, Outside};
use crate::history::{Acknowledged, Registered, Served, Told, WorkerEnd};

/// The telemetry interval.
const TELEMETRY_EVERY: Duration = Duration::from_millis(100);
/// The time between two checkpointed events, in milliseconds.
const HAPPENS_MS: std::ops::Range<u64> = 50..500;
/// The preparation time of a function, in milliseconds.
const PREPARES_MS: std::ops::Range<u64> = 0..800;
/// Items per batch, few enough that full syncs need several batches.
const ITEMS_MAX: usize = 6;
/// Named pieces of data, few enough that some exceed the limit.
const ENTRIES_MAX: usize = 24;
/// Models that are loaded and dropped.
const MODELS: u64 = 5;

/// A process of a worker.
pub(crate) struct Process {
    machine: u64,
    name: NodeName,
    instance: String,
    began: Instant,
    outside: Rc<Outside>,
    inner: RefCell<Inner>,
}

struct Inner {
    rng: StdRng,
    core: WorkerCheckpoint,
    epoch: Option<Epoch>,
    /// The stamp (term, index) of the obeyed desired state.
    stamp: Option<(u64, u64)>,
    /// The served functions, and the time at which each is ready.
    serves: BTreeMap<Served, Instant>,
    /// The functions last reported as ready.
    said: BTreeSet<Served>,
    streams: BTreeMap<u64, mpsc::Sender<wire::WorkerMessage>>,
    streams_opened: u64,
    /// The terms of the controllers that announced leadership, by stream.
    leaders: BTreeMap<u64, u64>,
    leader: Option<u64>,
    /// The number of the last batch.
    sent: u64,
    data: Vec<DataId>,
    counter: u64,
    telemetry: u64,
    telemetry_due: Instant,
    happens: Instant,
}

impl Process {
    pub(super) fn new(machine: u64, instance: String, seed: u64, outside: Rc<Outside>) -> Self {
        let config = Config { items_max: ITEMS_MAX, entries_max: ENTRIES_MAX, ..Config::default() };
        let began = Instant::now();
        let inner = Inner {
            rng: StdRng::seed_from_u64(seed),
            core: WorkerCheckpoint::new(config),
            epoch: None,
            stamp: None,
            serves: BTreeMap::new(),
            said: BTreeSet::new(),
            streams: BTreeMap::new(),
            streams_opened: 0,
            leaders: BTreeMap::new(),
            leader: None,
            sent: 0,
            data: Vec::new(),
            counter: 0,
            telemetry: 0,
            telemetry_due: began,
            happens: began,
        };
        let name = super::name(machine);
        Self { machine, name, instance, began, outside, inner: RefCell::new(inner) }
    }

    /// Waits while the process is stopped. The connections stay open, because the operating system
    /// keeps open sockets.
    pub(super) async fn until_awake(&self) {
        while self.outside.stalls(self.machine) {
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.began.elapsed()
    }

    pub(super) fn greeting(&self) -> wire::WorkerHello {
        wire::WorkerHello {
            cluster_id: String::new(),
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            node: self.name.to_string(),
            instance: self.instance.clone(),
            address: "worker:7080".into(),
            gpus: vec![wire::GpuCapacity {
                index: 0,
                gpu_type: "stub".into(),
                memory_bytes: GPU_MEMORY.get(),
            }],
            host_memory_bytes: HOST_MEMORY.get(),
            topology: "stub".into(),
            stream_break: None,
            seen_epoch: self.inner.borrow().epoch.unwrap_or_default().0,
            runs_programs: false,
        }
    }

    pub(super) fn next_stream(&self) -> u64 {
        let mut inner = self.inner.borrow_mut();
        inner.streams_opened += 1;
        inner.streams_opened
    }

    pub(super) fn attached(&self, stream: u64, outgoing: mpsc::Sender<wire::WorkerMessage>, epoch: u64) {
        let statuses = {
            let mut inner = self.inner.borrow_mut();
            inner.streams.insert(stream, outgoing);
            inner.statuses()
        };
        self.say(stream, statuses);
        self.registered(epoch);
    }

    pub(super) fn detached(&self, stream: u64) {
        self.inner.borrow_mut().streams.remove(&stream);
        self.led(stream, 0, false);
    }

    /// Handles the epoch from a controller: the newest epoch wins.
    pub(super) fn registered(&self, epoch: u64) {
        let epoch = Epoch(epoch);
        let registered = Registered { node: self.name.clone(), instance: self.instance.clone(), epoch };
        self.outside.registered.borrow_mut().insert(registered);
        let newer = {
            let mut inner = self.inner.borrow_mut();
            let newer = inner.epoch < Some(epoch);
            inner.epoch = inner.epoch.max(Some(epoch));
            newer
        };
        if newer {
            self.tell(Event::Registered { epoch });
        }
    }

    /// Handles an announcement of leadership: the highest term wins.
    pub(super) fn led(&self, stream: u64, term: u64, leads: bool) {
        let reached = {
            let mut inner = self.inner.borrow_mut();
            if leads {
                inner.leaders.insert(stream, term);
            } else {
                inner.leaders.remove(&stream);
            }
            let leader = inner.leaders.iter().max_by_key(|&(_, term)| term).map(|(&stream, _)| stream);
            std::mem::replace(&mut inner.leader, leader) != leader && leader.is_some()
        };
        if reached {
            self.tell(Event::Reached);
        }
    }

    /// Handles a desired state, which is obeyed unless outdated.
    pub(super) fn told(&self, controller: u64, stream: u64, state: &ItemSet<wire::DesiredState>) {
        let stamp = (state.head().term, state.head().index);
        let functions: BTreeSet<Served> = state.items().iter().filter_map(served).collect();
        let obeyed = {
            let mut inner = self.inner.borrow_mut();
            let obeyed = inner.stamp < Some(stamp);
            if obeyed {
                inner.stamp = Some(stamp);
                inner.serve(&functions);
            }
            obeyed
        };
        self.outside.told.borrow_mut().push(Told {
            node: self.name.clone(),
            instance: self.instance.clone(),
            controller,
            stream,
            stamp,
            functions,
            obeyed,
        });
    }

    pub(super) fn acknowledged(&self, ack: &wire::CheckpointAck) {
        let epoch = Epoch(ack.epoch);
        let seq = ack.seq;
        if ack.full_wanted {
            let sent = self.inner.borrow().sent;
            self.tell(Event::ResyncWanted { epoch, seq: sent, last: seq });
            return;
        }
        let acknowledged = Acknowledged { node: self.name.clone(), epoch, seq };
        self.outside.acknowledged.borrow_mut().push(acknowledged);
        self.tell(Event::Acknowledged { epoch, seq });
    }

    /// Performs the due actions.
    pub(super) fn look(&self) {
        let now = Instant::now();
        let (telemetry, statuses) = {
            let mut inner = self.inner.borrow_mut();
            (inner.telemetry(now), inner.news(now))
        };
        for message in telemetry.into_iter().chain(statuses) {
            self.say_all(&message);
        }
        if self.inner.borrow().happens <= now && !self.outside.is_calm() {
            let events = self.inner.borrow_mut().happen(&self.name, now);
            for event in events {
                self.tell(event);
            }
        }
        let wake = self.inner.borrow().core.next_wake();
        if wake.is_some_and(|wake| wake <= self.now()) {
            self.tell(Event::Tick);
        }
    }

    pub(super) fn say_goodbye(&self) {
        self.outside.goodbyes.borrow_mut().insert(self.instance.clone());
        self.say_all(&Message::Goodbye(wire::Goodbye {}));
        self.inner.borrow_mut().streams.clear();
    }

    fn tell(&self, event: Event) {
        let now = self.now();
        let mut actions = Vec::new();
        self.inner.borrow_mut().core.on_event(now, event, &mut actions);
        for Action::Send(batch) in actions {
            self.send(&batch);
        }
    }

    fn send(&self, batch: &Arc<SyncBatch>) {
        let leader = {
            let mut inner = self.inner.borrow_mut();
            inner.sent = batch.seq;
            inner.leader
        };
        self.outside.sent.borrow_mut().insert((self.name.clone(), batch.epoch, batch.seq), Arc::clone(batch));
        if let Some(leader) = leader {
            let batch = rmp_serde::to_vec_named(batch.as_ref()).unwrap().into();
            self.say(leader, Message::Checkpoint(wire::Checkpoint { batch }));
        }
    }

    fn say(&self, stream: u64, message: Message) {
        if let Some(outgoing) = self.inner.borrow().streams.get(&stream) {
            // A controller that reads slowly misses messages.
            drop(outgoing.try_send(wire::WorkerMessage { message: Some(message) }));
        }
    }

    fn say_all(&self, message: &Message) {
        let streams: Vec<u64> = self.inner.borrow().streams.keys().copied().collect();
        for stream in streams {
            self.say(stream, message.clone());
        }
    }

    /// Returns the process's state for the end of the run.
    pub(crate) fn end(&self) -> WorkerEnd {
        let inner = self.inner.borrow();
        WorkerEnd {
            node: self.name.clone(),
            epoch: inner.epoch,
            settled: inner.core.is_settled(),
            everything: inner.core.everything(),
            serves: inner.serves.keys().cloned().collect(),
        }
    }
}

impl Inner {
    /// Serves exactly these functions.
    fn serve(&mut self, functions: &BTreeSet<Served>) {
        self.serves.retain(|function, _| functions.contains(function));
        let now = Instant::now();
        for function in functions {
            if !self.serves.contains_key(function) {
                let ready = now + Duration::from_millis(self.rng.random_range(PREPARES_MS));
                self.serves.insert(function.clone(), ready);
            }
        }
    }

    fn statuses(&self) -> Message {
        let status = |(function, &ready): (&Served, &Instant)| {
            let (name, revision) = function.clone();
            let ready = ready <= Instant::now();
            let phase = if ready { wire::FunctionPhase::Ready } else { wire::FunctionPhase::Preparing };
            wire::FunctionStatus { name, revision, phase: phase.into(), ..Default::default() }
        };
        Message::FunctionStatuses(wire::FunctionStatuses {
            functions: self.serves.iter().map(status).collect(),
            ..Default::default()
        })
    }

    /// Returns the functions' statuses if the ready functions changed.
    fn news(&mut self, now: Instant) -> Option<Message> {
        let ready = self.serves.iter().filter(|(_, ready)| **ready <= now);
        let ready: BTreeSet<Served> = ready.map(|(function, _)| function.clone()).collect();
        (std::mem::replace(&mut self.said, ready.clone()) != ready).then(|| self.statuses())
    }

    fn telemetry(&mut self, now: Instant) -> Option<Message> {
        if now < self.telemetry_due {
            return None;
        }
        self.telemetry_due = now + TELEMETRY_EVERY;
        self.telemetry += 1;
        let gpu = wire::GpuTelemetry {
            health: wire::GpuHealth::Up.into(),
            memory_bytes: GPU_MEMORY.get(),
            busy_ns: self.telemetry * 1_000_000,
            ..Default::default()
        };
        Some(Message::Telemetry(wire::Telemetry {
            epoch: self.epoch.unwrap_or_default().0,
            seq: self.telemetry,
            gpus: vec![gpu],
            ..Default::default()
        }))
    }

    /// Draws events that are checkpointed.
    fn happen(&mut self, name: &NodeName, now: Instant) -> Vec<Event> {
        self.happens = now + Duration::from_millis(self.rng.random_range(HAPPENS_MS));
        let Some(epoch) = self.epoch else { return Vec::new() };
        let digest = Digest::of(&self.rng.random_range(0..MODELS).to_le_bytes());
        let tier = if self.rng.random() { MemoryTier::Host } else { MemoryTier::Gpu(GpuIndex(0)) };
        let copy = ModelCopy { digest, tier };
        match self.rng.random_range(0..10) {
            0..2 => vec![Event::ModelLoaded { copy, bytes: Bytes(7) }],
            2 => vec![Event::ModelDropped { copy }],
            3..7 => {
                self.counter += 1;
                let id = DataId { home: name.clone(), epoch, counter: self.counter };
                self.data.push(id.clone());
                vec![Event::DataStored { id, bytes: Bytes(self.counter) }]
            }
            7 if !self.data.is_empty() => {
                let gone = self.rng.random_range(0..self.data.len());
                vec![Event::DataDropped { id: self.data.swap_remove(gone) }]
            }
            _ => {
                let Some((function, _)) = self.serves.keys().next().cloned() else { return Vec::new() };
                let function =
                    millrace_proto::convert::function_key("", &function).expect("a function's name");
                vec![
                    Event::Scored { function: function.clone(), counts: SloCounts { m: 1, n: 2 } },
                    Event::Used { function, usage: Usage { gpu_ns: 1_000, requests: 2, idle_ms: 7 } },
                ]
            }
        }
    }
}

fn served(item: &DesiredItem) -> Option<Served> {
    match item {
        DesiredItem::Function(function) => Some((function.name.clone(), function.revision)),
        DesiredItem::Quota(_) => None,
    }
}
