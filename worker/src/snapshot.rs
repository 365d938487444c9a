//! What the node looks like at one moment: what telemetry, routing and `millrace ps` show.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_policy::admission::Score;
use millrace_policy::batching::Totals;
use millrace_policy::dispatch::{PredictionError, Stats};
use millrace_policy::fabric::Tally;
use millrace_types::topology::LinkId;
use millrace_types::{Bytes, BytesPerSec, Digest, FunctionKey, GpuIndex, Incarnation, RevisionKey};

use crate::policy::InForce;

/// A node at one moment. Its parts are asked one after the other, so a request on its way between
/// two of them may be in neither.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeSnapshot {
    /// Every GPU, in index order.
    pub gpus: Vec<GpuSnapshot>,
    /// Every function, in key order.
    pub functions: Vec<FunctionSnapshot>,
    /// What revisions that are gone from here have counted. Added to those that are here, nothing
    /// that a function ever counted on this node is missing.
    pub past: BTreeMap<FunctionKey, Score>,
    /// How long each function was idle in host memory (T26), since the worker began; of those that
    /// are gone from here too.
    pub idle: BTreeMap<FunctionKey, Duration>,
    /// Every link that models cross, in link order.
    pub links: Vec<LinkSnapshot>,
    /// Requests in the node's queue.
    pub queued: u32,
    /// What dispatch has counted (L17).
    pub dispatch: Stats,
    /// Runs of several requests.
    pub batches: Totals,
    /// Transfers to its GPUs that are over, and how long they waited for their links.
    pub transfers: Tally,
    /// How it schedules now.
    pub policy: Option<InForce>,
}

impl NodeSnapshot {
    /// How wrong the cost model was, by type of GPU and by what turns had to do.
    pub fn predictions(&self) -> impl Iterator<Item = (&str, PredictionError)> {
        let types: BTreeSet<&str> = self.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
        let types: Vec<_> = types.into_iter().collect();
        let told = self.dispatch.errors.iter();
        told.filter_map(move |error| Some((*types.get(error.kind as usize)?, *error)))
    }
}

/// How much of a node is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// All of it.
    Whole,
    /// Its queue, GPUs and links: what routing reads, whatever the number of functions.
    Machine,
}

/// How a GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuHealth {
    /// Its first executor is not up yet.
    Starting,
    /// It serves.
    Up,
    /// Its executor died and another is being started.
    Restarting,
    /// The device itself failed; its executor is being replaced.
    Unhealthy,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSnapshot {
    /// Which.
    pub index: GpuIndex,
    /// Its product name.
    pub gpu_type: String,
    /// How it is.
    pub health: GpuHealth,
    /// Its memory, in whole blocks.
    pub memory: Bytes,
    /// What of that is taken.
    pub used: Bytes,
    /// The models on it, in [`Digest`] order.
    pub models: Vec<ResidentModel>,
    /// Whose request runs.
    pub running: Option<RevisionKey>,
    /// The present executor, or the last one.
    pub incarnation: Incarnation,
    /// Its process, where one that all models share is up.
    pub executor_pid: Option<u32>,
    /// All its processes: that one, or one for each model that was loaded.
    pub executor_pids: Vec<u32>,
    /// Executors started after the first.
    pub restarts: u64,
    /// Models brought onto it.
    pub swaps: u64,
    /// Of those, the ones that came whole from another GPU.
    pub peer_swaps: u64,
    /// Models evicted from it.
    pub evictions: u64,
    /// Time spent computing.
    pub busy: Duration,
    /// The intermediate data on it.
    pub data: GpuData,
}

/// Intermediate data on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuData {
    /// What objects take of its memory, in whole blocks.
    pub used: Bytes,
    /// What is allocated for them: that, and what is kept for more.
    pub pool: Bytes,
    /// Objects copied to the host to make room.
    pub migrated: u64,
    /// Objects copied back.
    pub reloaded: u64,
    /// Objects that there was no room for.
    pub refused: u64,
}

/// A model on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct ResidentModel {
    /// Which.
    pub digest: Digest,
    /// The functions of this node that use it, in order.
    pub functions: Vec<RevisionKey>,
    /// The memory it holds.
    pub bytes: Bytes,
    /// What of its weights has arrived.
    pub loaded: Bytes,
    /// Since its last use.
    pub idle: Duration,
    /// The process that runs it, where one is up.
    pub executor_pid: Option<u32>,
}

/// One function.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionSnapshot {
    /// Which.
    pub key: RevisionKey,
    /// Requests admitted and not answered.
    pub in_flight: u32,
    /// What it has counted.
    pub score: Score,
}

/// One link.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkSnapshot {
    /// Which.
    pub link: LinkId,
    /// Its rate as the topology says, in each direction.
    pub rate: BytesPerSec,
    /// Its rate towards the GPUs as measured over the last batches; `None` before the first.
    pub measured: Option<BytesPerSec>,
    /// Bytes carried towards the GPUs.
    pub carried: Bytes,
    /// Its rate towards the host as measured over the last batches; `None` before the first.
    pub measured_to_host: Option<BytesPerSec>,
    /// Bytes carried towards the host.
    pub carried_to_host: Bytes,
    /// Batches granted and not finished.
    pub outstanding: u32,
}

/// One actor's part of a snapshot.
pub(crate) enum SnapshotPart {
    Gpu(GpuSnapshot),
    Function(FunctionSnapshot),
    Link(LinkSnapshot),
    Past(BTreeMap<FunctionKey, Score>),
    Queue { queued: u32, stats: Stats, batches: Totals, transfers: Tally, policy: InForce },
    Idle(BTreeMap<FunctionKey, Duration>),
}

impl NodeSnapshot {
    pub(crate) fn add(&mut self, part: SnapshotPart) {
        match part {
            SnapshotPart::Gpu(gpu) => self.gpus.push(gpu),
            SnapshotPart::Function(function) => self.functions.push(function),
            SnapshotPart::Link(link) => self.links.push(link),
            SnapshotPart::Past(past) => self.past = past,
            SnapshotPart::Queue { queued, stats, batches, transfers, policy } => {
                (self.queued, self.dispatch, self.batches) = (queued, stats, batches);
                (self.transfers, self.policy) = (transfers, Some(policy));
            }
            SnapshotPart::Idle(idle) => self.idle = idle,
        }
    }

    /// What each function counted on this node, those of its revisions that are gone included, and how
    /// many of its requests are in flight.
    #[must_use]
    pub fn scores(&self) -> BTreeMap<&FunctionKey, (Score, u32)> {
        let mut scores: BTreeMap<_, (Score, u32)> =
            self.past.iter().map(|(key, &score)| (key, (score, 0))).collect();
        for it in &self.functions {
            let (score, in_flight) = scores.entry(&it.key.function).or_default();
            *score = score.plus(it.score);
            *in_flight += it.in_flight;
        }
        scores
    }

    pub(crate) fn sort(&mut self) {
        self.gpus.sort_by_key(|gpu| gpu.index);
        self.functions.sort_by(|a, b| a.key.cmp(&b.key));
        self.links.sort_by_key(|link| link.link);
    }
}
