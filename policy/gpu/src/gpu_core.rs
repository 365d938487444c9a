//! The state of a GPU: its executor, memory, requests and transfers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, SliceCompute, SliceId, Timestamp};

use super::data_store::GpuDataStore;
use super::executor_seat::ExecutorSeat;
use super::isolation::ExecutorIsolation;
use super::lines::Lines;
use super::programs::ProgramTable;
use super::seat_tokens::SeatTokens;
use millrace_core::ids::{Generation, RequestKey, RunId, TransferId};
use millrace_memory::elastic;
use millrace_memory::eviction::Eviction;
use millrace_memory::{BlockRun, CHUNK, MemoryMap};
use millrace_slices::tokens;

/// The health of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExecutorHealth {
    /// The GPU's first executor is not up yet.
    Starting,
    /// The GPU serves requests.
    Up,
    /// The GPU's executor was lost, and another is being started.
    Restarting,
    /// The device failed, and its executor is being replaced.
    Unhealthy,
}

/// The counters of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuCounters {
    /// Models loaded onto the GPU.
    pub swaps: u64,
    /// Loaded models that were copied wholly from another GPU.
    pub peer_swaps: u64,
    /// Models evicted to make room.
    pub evictions: u64,
    /// Time spent computing on all SMs: the time of a run on a part of the SMs counts in proportion.
    pub busy: Duration,
    /// Executors after the first.
    pub restarts: u64,
}

/// A transfer to this GPU that has not ended.
#[derive(Debug)]
pub(super) struct IncomingTransfer {
    pub(super) transfer: TransferId,
    pub(super) model: ModelId,
    pub(super) generation: Generation,
    pub(super) cancelled: bool,
    /// Whether all bytes of the transfer count as copied for a request whose run has ended. Reports
    /// that arrive later are not counted for another request.
    pub(super) counted: bool,
    /// Whether the fabric knows that a request waits for the transfer.
    pub(super) hastened: bool,
}

/// The time until which a model that is loaded before its requests is spared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PrefetchProtection {
    /// Until all of its weights are on this GPU.
    Here,
    /// Until a request uses the model.
    Used,
}

/// The state of a GPU.
#[derive(Debug)]
pub struct GpuCore {
    pub(super) index: GpuIndex,
    pub(super) health: ExecutorHealth,
    pub(super) incarnation: Option<Incarnation>,
    pub(super) memory: MemoryMap,
    /// The store of intermediate data; `None` if such data stays in host memory.
    pub(super) data: Option<GpuDataStore>,
    pub(super) eviction: Eviction,
    pub(super) isolation: ExecutorIsolation,
    /// Models that requests in the node's queue wait for on this GPU. Such a model is evicted only if
    /// nothing else makes room for a request that is already on this GPU.
    pub(super) awaited: BTreeSet<ModelId>,
    /// Models of which this GPU has the warm copy.
    pub(super) kept: BTreeSet<ModelId>,
    /// The next time to look for copies that were not used for as long as they may stay.
    pub(super) look_at: Option<Timestamp>,
    /// Models that are loaded before any request needs them, with the time until which each model
    /// is spared.
    pub(super) prefetched: BTreeMap<ModelId, PrefetchProtection>,
    pub(super) programs: ProgramTable,
    pub(super) lines: Lines,
    pub(super) moving: Vec<IncomingTransfer>,
    /// Models that other GPUs copy from this GPU, by transfer. None of these is evicted.
    pub(super) lent: BTreeMap<TransferId, ModelId>,
    /// Lent models that lost the process. No request can use such a model here any longer.
    pub(super) leftovers: BTreeSet<ModelId>,
    /// The next time at which a model that waits for a new process may start one.
    pub(super) look_again: Option<Timestamp>,
    pub(super) last_run: RunId,
    pub(super) last_transfer: TransferId,
    pub(super) totals: GpuCounters,
    /// The wanted sharing of the GPU; `None`: a single run has the whole GPU.
    pub(super) sharing: Option<tokens::Config>,
    /// The terms and curves of the GPU's slices, which have an effect while the GPU is shared.
    pub(super) slices: BTreeMap<SliceId, SliceCompute>,
    /// The tokens of the seats, if the GPU is shared.
    pub(super) tokens: Option<SeatTokens>,
    /// The last period of a seat before the present [`Self::tokens`].
    pub(super) last_period: u64,
    pub(super) workspaces: Vec<RunWorkspace>,
}

/// Memory for what a seat's runs of a model compute, beside the memory of the model's region. The first
/// seat that runs a model needs none.
#[derive(Debug)]
pub(super) struct RunWorkspace {
    pub(super) seat: ExecutorSeat,
    pub(super) model: ModelId,
    pub(super) blocks: Vec<BlockRun>,
}

impl GpuCore {
    /// Returns a GPU without an executor and with empty memory. It evicts the least recently used
    /// models first.
    #[must_use]
    pub fn new(gpu: GpuIndex, memory: MemoryMap) -> Self {
        Self {
            index: gpu,
            health: ExecutorHealth::Starting,
            incarnation: None,
            memory,
            data: None,
            eviction: Eviction::Lru,
            isolation: ExecutorIsolation::default(),
            awaited: BTreeSet::new(),
            kept: BTreeSet::new(),
            look_at: None,
            prefetched: BTreeMap::new(),
            programs: ProgramTable::default(),
            lines: Lines::default(),
            moving: Vec::new(),
            lent: BTreeMap::new(),
            leftovers: BTreeSet::new(),
            look_again: None,
            last_run: RunId(0),
            // Transfer ids must differ between the GPUs of a node.
            last_transfer: TransferId(u64::from(gpu.0) << 40),
            totals: GpuCounters::default(),
            sharing: None,
            slices: BTreeMap::new(),
            tokens: None,
            last_period: 0,
            workspaces: Vec::new(),
        }
    }

    /// Returns the GPU with another eviction policy.
    #[must_use]
    pub fn with_eviction(self, eviction: Eviction) -> Self {
        Self { eviction, ..self }
    }

    /// Returns the GPU with another isolation of models.
    #[must_use]
    pub fn with_isolation(self, isolation: ExecutorIsolation) -> Self {
        Self { isolation, ..self }
    }

    /// Returns the GPU shared in this way; `None`: a single run has the whole GPU.
    #[must_use]
    pub fn with_sharing(self, sharing: Option<tokens::Config>) -> Self {
        Self { sharing, ..self }
    }

    /// Returns the GPU with these slices.
    #[must_use]
    pub fn with_slices(self, slices: BTreeMap<SliceId, SliceCompute>) -> Self {
        Self { slices, ..self }
    }

    /// Returns the GPU with a store of intermediate data. Without effect unless models share an
    /// executor and the memory layout can give out any free block. The store's unit is the GPU's
    /// block, whatever the configuration names.
    #[must_use]
    pub fn with_data(self, config: Option<elastic::Config>) -> Self {
        let fits = !self.isolation.per_model() && self.memory.gives_any_block();
        let block = self.memory.block();
        let data = config.filter(|_| fits).map(|config| GpuDataStore::new(config, block));
        Self { data, ..self }
    }

    #[must_use]
    pub fn health(&self) -> ExecutorHealth {
        self.health
    }

    #[must_use]
    pub fn memory(&self) -> &MemoryMap {
        &self.memory
    }

    #[must_use]
    pub fn totals(&self) -> GpuCounters {
        self.totals
    }

    /// Returns the request of each seat that runs, or would run next, in the order of the seats.
    pub fn running(&self) -> impl Iterator<Item = RequestKey> {
        self.lines.heads().map(|head| head.key)
    }

    /// Whether a request is assigned to this GPU.
    #[must_use]
    pub fn has(&self, key: RequestKey) -> bool {
        self.lines.place_of(key).is_some()
    }

    /// Returns the number of requests on all seats of this GPU.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.lines.len()
    }

    /// Returns the number of models with a transfer to this GPU that has not ended.
    #[must_use]
    pub fn transfers(&self) -> usize {
        self.moving.len()
    }

    /// Returns the size of a model's weights that have arrived.
    #[must_use]
    pub fn loaded(&self, model: ModelId) -> Bytes {
        let chunks = self.memory.region(model).map_or(0, |region| region.loaded().held());
        let weights = self.programs.shape(model).map_or(Bytes::ZERO, |shape| shape.weights);
        // The last chunk is short.
        Bytes(CHUNK.0 * u64::from(chunks)).min(weights)
    }
}
