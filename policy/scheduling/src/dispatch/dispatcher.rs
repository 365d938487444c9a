//! The queue of a node, and the requests, models and GPUs that it knows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Alphas, Bytes, GpuIndex, ModelId, Reason, Timestamp};

use super::config::{Config, GpuConfig};
use super::cost::PredictionErrors;
use super::create_policy::create_policy;
use super::fleet::GpuTable;
use super::inputs::InputLocations;
use super::models::{ModelSlot, ModelTable};
use super::policy::{DispatchPolicy, DispatchStats, QueueEntry};
use super::prewarm_hint::PendingPrewarm;
use super::protocol::{Action, ModelProfile, QueuedRequest};
use super::queue::WaitingRequest;
use super::size_rank::SizeRank;
use super::slice_table::SlicedFunctions;
use super::warm_copies::WarmCopyTable;
use millrace_core::ids::{RequestKey, SeatIndex};

#[derive(Debug, Clone, Copy)]
pub(super) enum RequestLocation {
    Queued { request: WaitingRequest, reserved: Option<GpuIndex> },
    On(SeatIndex),
}

/// The alphas of an earlier registration.
#[derive(Debug, Default)]
pub(super) struct CommittedAlphas {
    pub(super) alphas: Alphas,
    /// Time until which a new policy begins with the alphas.
    pub(super) until: Timestamp,
}

/// Queue of a node, with the dispatcher's model of the node's GPUs.
#[derive(Debug)]
pub struct Dispatcher {
    pub(super) queue_max: u32,
    /// Distinct sizes of the memory that the GPUs give out, ascending.
    pub(super) sizes: Vec<Bytes>,
    pub(super) fleet: GpuTable,
    pub(super) models: ModelTable,
    pub(super) policy: Box<dyn DispatchPolicy>,
    /// Current configuration; changes with the policy.
    pub(super) config: Config,
    pub(super) places: BTreeMap<RequestKey, RequestLocation>,
    pub(super) queued: usize,
    /// Number of requests that wait for a single GPU, by GPU and model.
    pub(super) pins: BTreeMap<(GpuIndex, ModelSlot), u32>,
    pub(super) warm: WarmCopyTable,
    /// GPUs on which a suspect waits for the other requests to end.
    pub(super) draining: BTreeSet<GpuIndex>,
    /// Functions with slices of GPUs.
    pub(super) sliced: SlicedFunctions,
    /// Models to prewarm for which no GPU has had time or room yet.
    pub(super) likely: Vec<PendingPrewarm>,
    /// Requests that tenant caps keep outside the queue.
    pub(super) outside: usize,
    /// Number of rows that run as one, for requests that stand for a batch.
    pub(super) rows: BTreeMap<RequestKey, u32>,
    /// Location of the inputs, for requests that have inputs on GPUs.
    pub(super) inputs: BTreeMap<RequestKey, InputLocations>,
    /// Time of the next check whether an idle GPU should recall a request from a busy GPU.
    pub(super) look_again: Option<Timestamp>,
    pub(super) committed: CommittedAlphas,
    pub(super) errors: PredictionErrors,
    pub(super) stats: DispatchStats,
}

impl Dispatcher {
    /// Creates an empty queue, with all GPUs down.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut sizes: Vec<Bytes> = config.gpus.iter().map(GpuConfig::usable).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let rank = |gpu: &GpuConfig| SizeRank(sizes.partition_point(|&other| other < gpu.usable()));
        let ranks: Vec<SizeRank> = config.gpus.iter().map(rank).collect();
        let (policy, idle_order) = create_policy(config, sizes.len());
        Self {
            queue_max: config.queue_max,
            fleet: GpuTable::new(config, &ranks, idle_order),
            models: ModelTable::default(),
            policy,
            config: config.clone(),
            places: BTreeMap::new(),
            queued: 0,
            pins: BTreeMap::new(),
            warm: WarmCopyTable::default(),
            draining: BTreeSet::new(),
            sliced: SlicedFunctions::default(),
            likely: Vec::new(),
            outside: 0,
            rows: BTreeMap::new(),
            inputs: BTreeMap::new(),
            look_again: None,
            committed: CommittedAlphas::default(),
            errors: PredictionErrors::default(),
            stats: DispatchStats::default(),
            sizes,
        }
    }

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Returns whether a request waits or is on a GPU.
    #[must_use]
    pub fn holds(&self, key: RequestKey) -> bool {
        self.places.contains_key(&key)
    }

    /// Returns the number of requests that wait or are on a GPU.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.places.len()
    }

    /// Returns how many rows run as one for a request: 1, unless the request stands for a batch.
    #[must_use]
    pub fn rows(&self, key: RequestKey) -> u32 {
        self.rows.get(&key).copied().unwrap_or(1)
    }

    /// Returns the expected run time of a model with `rows` rows, on the kind of GPU where the run
    /// takes longest.
    #[must_use]
    pub fn predicted_run(&self, model: ModelId, rows: u32) -> Option<Duration> {
        self.models.longest_run(self.models.installed(model)?, rows)
    }

    /// Returns whether decisions depend on [`Event::Objective`], [`Event::SloCountsChanged`] and
    /// [`Event::FunctionRemoved`]; otherwise the caller need not send these events. Every policy needs
    /// [`Event::ModelLoaded`], because the cost model learns from arrivals and a load occupies links.
    #[must_use]
    pub fn uses_scores(&self) -> bool {
        self.policy.uses_scores()
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> DispatchStats {
        let top_copies = self.models.most_requested().map_or(0, |model| model.holders.len());
        let mut stats = DispatchStats {
            errors: self.errors.get(),
            held_out: self.models.held_out(),
            top_copies,
            ..self.stats.clone()
        };
        self.policy.add_stats(&mut stats);
        stats
    }

    /// Returns the profile of each model that ran, by kind of GPU. [`Event::ProfileLoaded`] restores a
    /// profile.
    pub fn learned(&self) -> impl Iterator<Item = ModelProfile> {
        self.models.profiled_models().filter_map(|(slot, kind, run)| {
            let gpu = self.fleet.all().map(|gpu| self.fleet.get(gpu)).find(|gpu| gpu.kind == kind)?;
            let load = gpu.transfer_time(&self.models, slot);
            let model = self.models.get(slot).id;
            let swap = self.models.cost(slot, kind).and_then(|cost| cost.host());
            Some(ModelProfile { model, kind, load, swap, run })
        })
    }

    /// Returns [`DispatchStats::reserved`] alone, without the scan over all models that [`Self::stats`]
    /// makes.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        let mut stats = DispatchStats::default();
        self.policy.add_stats(&mut stats);
        stats.reserved
    }

    pub(super) fn install(&mut self, model: ModelId, memory: Bytes, weights: Bytes) {
        let memory = memory.max(weights);
        // A GPU gives out whole blocks, so a model that is at most as large fits in whole blocks too.
        let rank = self.sizes.partition_point(|&size| size < memory);
        let rank = (rank < self.sizes.len()).then_some(SizeRank(rank));
        self.models.install(model, memory, weights, rank);
    }

    pub(super) fn enqueue(&mut self, now: Timestamp, request: QueuedRequest, actions: &mut Vec<Action>) {
        let QueuedRequest { key, function, model, attempts, priority, inputs } = request;
        let found = self.models.installed(model).map(|model| (model, self.models.get(model).rank));
        let refuse = match found {
            None => Reason::FunctionNotReady,
            Some((_, None)) => Reason::NoGpuMemory,
            Some(_) if self.queued >= self.queue_max as usize => Reason::QueueFull,
            Some((model, Some(rank))) => {
                self.models.add_user(model);
                // Data locations of a whole batch are already known and must stay.
                if !self.rows.contains_key(&key) {
                    self.set_inputs(key, inputs);
                }
                let request = WaitingRequest { key, function, model, rank, attempts, priority, arrived: now };
                return self.queue_up(request, QueueEntry::New);
            }
        };
        self.rows.remove(&key);
        self.inputs.remove(&key);
        actions.push(Action::Fail { key, reason: refuse, may_have_executed: false });
    }

    pub(super) fn queue_up(&mut self, request: WaitingRequest, entry: QueueEntry) {
        self.places.insert(request.key, RequestLocation::Queued { request, reserved: None });
        self.queued += 1;
        if self.sliced.has(&request) {
            self.sliced.push(&request);
        } else {
            self.policy.push(request, entry);
        }
    }
}
