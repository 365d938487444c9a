//! Snapshots of the node, from which telemetry, routing and `millrace ps` are served.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_gpu::SliceUse;
use millrace_scheduling::admission::FunctionTotals;
use millrace_scheduling::batching::BatchCounts;
use millrace_scheduling::dispatch::{DispatchStats, NodeWork, PredictionError};
use millrace_transfers::fabric::TransferCounts;
use millrace_types::topology::LinkId;
use millrace_types::{
    Bytes, BytesPerSec, Digest, FunctionKey, GpuIndex, Incarnation, RevisionKey, SliceId, SmShare,
};
use tokio::sync::mpsc;

use crate::policy::EffectivePolicy;

/// A snapshot of a node. The actors are asked one after the other, so a request in transit between
/// two actors may be missing from both parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeSnapshot {
    /// All GPUs, in index order.
    pub gpus: Vec<GpuSnapshot>,
    /// All functions, in key order.
    pub functions: Vec<FunctionSnapshot>,
    /// Scores of revisions that were removed from the node. Together with the scores in
    /// `functions`, the sum is all that a function ever counted on this node.
    pub past: BTreeMap<FunctionKey, FunctionTotals>,
    /// Time for which each function was idle in host memory since the worker began (T26), removed
    /// functions included.
    pub idle: BTreeMap<FunctionKey, Duration>,
    /// All links that models cross, in link order.
    pub links: Vec<LinkSnapshot>,
    /// Number of requests in the node's queue.
    pub queued: u32,
    /// Expected GPU time of the node's requests.
    pub work: NodeWork,
    /// Measured time that bringing each model to a GPU adds to a run.
    pub loads: Arc<BTreeMap<Digest, Duration>>,
    /// Counters of the dispatch policy (L17).
    pub dispatch: DispatchStats,
    /// Counters of batched runs.
    pub batches: BatchCounts,
    /// Counts of finished transfers to the node's GPUs, and their waiting times for links.
    pub transfers: TransferCounts,
    /// The scheduling policy in force.
    pub policy: Option<EffectivePolicy>,
}

impl NodeSnapshot {
    /// Returns the prediction errors of the cost model, by type of GPU and kind of work.
    pub fn predictions(&self) -> impl Iterator<Item = (&str, PredictionError)> {
        let types: BTreeSet<&str> = self.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
        let types: Vec<_> = types.into_iter().collect();
        let told = self.dispatch.errors.iter();
        told.filter_map(move |error| Some((*types.get(error.kind as usize)?, *error)))
    }
}

/// The selection of a snapshot's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotScope {
    /// The whole node.
    Whole,
    /// The queue, GPUs and links. Routing reads only these, so its cost does not grow with the
    /// number of functions.
    Machine,
}

/// The health of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuHealth {
    /// The GPU's first executor has not started yet.
    Starting,
    /// The GPU serves requests.
    Up,
    /// The GPU's executor died and another is being started.
    Restarting,
    /// The device itself failed, and the GPU's executor is being replaced.
    Unhealthy,
}

/// A snapshot of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSnapshot {
    pub index: GpuIndex,
    /// Product name of the GPU type.
    pub gpu_type: String,
    pub health: GpuHealth,
    /// Size of the GPU's memory, in whole blocks.
    pub memory: Bytes,
    /// Allocated part of the memory.
    pub used: Bytes,
    /// Models on the GPU, in [`Digest`] order.
    pub models: Vec<ResidentModel>,
    /// Requests that run now, one for each seat that runs.
    pub running: Vec<RunningRequest>,
    /// Number of launches on SM units that another launch had at the same time, as the emulated device
    /// counted them.
    pub sm_violations: u64,
    /// The use of each slice of the GPU.
    pub slices: Vec<(SliceId, SliceUse)>,
    /// Incarnation of the present executor, or of the last executor.
    pub incarnation: Incarnation,
    /// Process id of the executor that all models share; `None` while the process is down, or in
    /// isolation.
    pub executor_pid: Option<u32>,
    /// Process ids of all executors: the shared one, or one for each loaded model.
    pub executor_pids: Vec<u32>,
    /// Number of executors started after the first.
    pub restarts: u64,
    /// Number of models loaded onto the GPU.
    pub swaps: u64,
    /// Number of loaded models that were copied whole from another GPU.
    pub peer_swaps: u64,
    /// Number of models evicted from the GPU.
    pub evictions: u64,
    /// Time spent computing.
    pub busy: Duration,
    /// Intermediate data on the GPU.
    pub data: GpuData,
}

/// A request that runs on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningRequest {
    pub function: RevisionKey,
    /// SMs of the request's last token; `None` if the request has the whole GPU, or no token yet.
    pub sms: Option<SmShare>,
}

/// The intermediate data on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuData {
    /// Memory of the objects, in whole blocks.
    pub used: Bytes,
    /// Memory allocated for objects: `used`, and the pool's free part.
    pub pool: Bytes,
    /// Number of objects copied to the host because memory was short.
    pub migrated: u64,
    /// Number of objects copied back from the host.
    pub reloaded: u64,
    /// Number of objects that did not fit.
    pub refused: u64,
}

/// A model on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct ResidentModel {
    pub digest: Digest,
    /// Functions of this node that use the model, in order.
    pub functions: Vec<RevisionKey>,
    /// Memory reserved for the model.
    pub bytes: Bytes,
    /// Bytes of the weights that have arrived.
    pub loaded: Bytes,
    /// Time since the model's last use.
    pub idle: Duration,
    /// Process id of the executor that runs the model, while the process is up.
    pub executor_pid: Option<u32>,
}

/// A snapshot of a function.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionSnapshot {
    pub key: RevisionKey,
    /// Number of requests that were admitted and not answered yet.
    pub in_flight: u32,
    pub score: FunctionTotals,
}

/// A snapshot of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkSnapshot {
    pub link: LinkId,
    /// Rate in each direction according to the topology.
    pub rate: BytesPerSec,
    /// Rate towards the GPUs as measured over the last batches; `None` before the first batch.
    pub measured: Option<BytesPerSec>,
    /// Bytes carried towards the GPUs.
    pub carried: Bytes,
    /// Rate towards the host as measured over the last batches; `None` before the first batch.
    pub measured_to_host: Option<BytesPerSec>,
    /// Bytes carried towards the host.
    pub carried_to_host: Bytes,
    /// Number of batches granted and not finished.
    pub outstanding: u32,
}

/// One actor's part of a snapshot.
pub(crate) enum SnapshotPart {
    Gpu(GpuSnapshot),
    Function(FunctionSnapshot),
    Link(LinkSnapshot),
    Past(BTreeMap<FunctionKey, FunctionTotals>),
    Queue {
        queued: u32,
        work: NodeWork,
        loads: Arc<BTreeMap<Digest, Duration>>,
        stats: DispatchStats,
        batches: BatchCounts,
        transfers: TransferCounts,
        policy: EffectivePolicy,
    },
    Idle(BTreeMap<FunctionKey, Duration>),
}

/// Sender of the parts of a snapshot.
pub(crate) type SnapshotSender = mpsc::UnboundedSender<SnapshotPart>;

impl NodeSnapshot {
    pub(crate) fn add(&mut self, part: SnapshotPart) {
        match part {
            SnapshotPart::Gpu(gpu) => self.gpus.push(gpu),
            SnapshotPart::Function(function) => self.functions.push(function),
            SnapshotPart::Link(link) => self.links.push(link),
            SnapshotPart::Past(past) => self.past = past,
            SnapshotPart::Queue { queued, work, loads, stats, batches, transfers, policy } => {
                self.queued = queued;
                self.work = work;
                self.loads = loads;
                self.dispatch = stats;
                self.batches = batches;
                self.transfers = transfers;
                self.policy = Some(policy);
            }
            SnapshotPart::Idle(idle) => self.idle = idle,
        }
    }

    /// Returns each function's score on this node, removed revisions included, and its number of
    /// requests in flight.
    #[must_use]
    pub fn scores(&self) -> BTreeMap<&FunctionKey, (FunctionTotals, u32)> {
        let mut scores: BTreeMap<_, (FunctionTotals, u32)> =
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
