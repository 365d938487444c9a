//! Scenarios drawn from a seed: requests, clients that leave, executors that die.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::{PolicyConfig, TorporConfig};
use millrace_transfers::rates::TransferSharing;
use millrace_types::policy::GpuSharingName;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Reason, Timestamp};
use millrace_worker::clock::{Sleeper, own_microsecond};
use millrace_worker::port::model::{ExecutorBehaviour, RunEnd, RunModel};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

pub(crate) const GPUS: u32 = 3;
const GPU_MEMORY: Bytes = Bytes::mib(64);
const REQUESTS: usize = 600;

/// The end of a request as its client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Answered { gpu: GpuIndex, attempts: u32 },
    Failed { reason: Reason, may_have_executed: bool },
    Cancelled,
}

/// An event from outside. Requests are numbered in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScenarioEvent {
    Arrive { request: usize, function: usize, timeout: Duration },
    Leave { request: usize },
    Kill(GpuIndex),
}

#[derive(Debug, Clone)]
pub(crate) struct FunctionModel {
    pub(crate) weights: Bytes,
    pub(crate) run: RunModel,
    pub(crate) idempotent: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) topology: Topology,
    pub(crate) dispatch: PolicyConfig,
    pub(crate) eviction: Eviction,
    pub(crate) sharing: TransferSharing,
    pub(crate) gpu_sharing: GpuSharingName,
    /// The functions, each with a separate model that has the same number.
    pub(crate) functions: Vec<FunctionModel>,
    pub(crate) copy_fails_every: Option<u64>,
    pub(crate) happenings: Vec<(Timestamp, ScenarioEvent)>,
    pub(crate) end: Timestamp,
}

impl Scenario {
    /// Draws a scenario with three GPUs, two of them behind one switch, and models that fill about
    /// three times the memory of one GPU.
    pub(crate) fn draw(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let functions = (0..7).map(|place| function(&mut rng, place)).collect::<Vec<_>>();
        let mut happenings = BTreeMap::new();
        let mut put = |at: Timestamp, happening| {
            let mut at = own_microsecond(at, Sleeper::OUTSIDE);
            while happenings.contains_key(&at) {
                at = own_microsecond(at + Duration::from_micros(1), Sleeper::OUTSIDE);
            }
            happenings.insert(at, happening);
        };
        let mut at = Timestamp(30_000_000);
        for request in 0..REQUESTS {
            at = at + Duration::from_micros(rng.random_range(0..6_000));
            // The last function kills the executor that runs it, so it is rare.
            let function = if rng.random_bool(0.01) {
                functions.len() - 1
            } else {
                rng.random_range(0..functions.len() - 1)
            };
            let timeout_ms =
                if rng.random_bool(0.15) { rng.random_range(1..25) } else { rng.random_range(200..900) };
            put(at, ScenarioEvent::Arrive { request, function, timeout: Duration::from_millis(timeout_ms) });
            if rng.random_bool(0.1) {
                let later = at + Duration::from_micros(rng.random_range(300..30_000));
                put(later, ScenarioEvent::Leave { request });
            }
        }
        for _ in 0..24 {
            let gpu = GpuIndex(rng.random_range(0..GPUS));
            put(Timestamp(rng.random_range(0..at.0)), ScenarioEvent::Kill(gpu));
        }
        // Requests are numbered in order of arrival, although timestamps were shifted.
        let mut happenings: Vec<_> = happenings.into_iter().collect();
        number(&mut happenings);
        let end = at + Duration::from_secs(40);
        Self {
            seed,
            topology: topology(),
            dispatch: PolicyConfig::default(),
            eviction: Eviction::default(),
            sharing: TransferSharing::Fair,
            gpu_sharing: GpuSharingName::Off,
            functions,
            copy_fails_every: Some(23),
            happenings,
            end,
        }
    }

    /// Returns the scenario with NVLinks between GPU 2 and both others. Its policies copy models
    /// over them and evict replicas first.
    pub(crate) fn joined(self) -> Self {
        let mut topology = self.topology;
        for (a, b) in [(0, 2), (1, 2)] {
            let kind = LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) };
            topology.links.push(TopologyLink { kind, rate: BytesPerSec::gb(40) });
        }
        let dispatch = PolicyConfig::Torpor(TorporConfig::default());
        Self { topology, dispatch, eviction: Eviction::Torpor, ..self }
    }

    pub(crate) fn behaviour(&self) -> ExecutorBehaviour {
        let runs = (0..).zip(&self.functions).map(|(model, function)| (model_name(model), function.run));
        ExecutorBehaviour {
            start: Duration::from_millis(8),
            process_start: Duration::ZERO,
            copy_rate: BytesPerSec::gb(12),
            copy_fails_every: self.copy_fails_every,
            ties: 0,
            runs: runs.collect(),
        }
    }

    pub(crate) fn requests(&self) -> usize {
        self.happenings.iter().filter(|(_, what)| matches!(what, ScenarioEvent::Arrive { .. })).count()
    }
}

/// Returns the name of function `number`'s model.
pub(crate) fn model_name(number: u32) -> String {
    format!("model {number}")
}

fn number(happenings: &mut [(Timestamp, ScenarioEvent)]) {
    let mut names = BTreeMap::new();
    for (_, happening) in happenings {
        match happening {
            ScenarioEvent::Arrive { request, .. } => {
                let number = names.len();
                names.insert(*request, number);
                *request = number;
            }
            ScenarioEvent::Leave { request } => *request = names[request],
            ScenarioEvent::Kill(_) => {}
        }
    }
}

fn function(rng: &mut SmallRng, place: usize) -> FunctionModel {
    let end = match place {
        6 => RunEnd::Aborts,
        5 => RunEnd::Fails,
        _ => RunEnd::Done,
    };
    let takes = Duration::from_micros(rng.random_range(400..9_000));
    FunctionModel {
        weights: Bytes(rng.random_range(100_000..45_000_000)),
        run: RunModel { end, ..RunModel::new(takes) },
        idempotent: place % 3 != 1,
    }
}

fn topology() -> Topology {
    let link = |kind| TopologyLink { kind, rate: BytesPerSec::gb(12) };
    let gpu = |index: u32, path: &[u32]| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "modelled".to_owned(),
        memory: GPU_MEMORY,
        host_path: path.iter().copied().map(LinkId).collect(),
    };
    Topology {
        name: "two-times".to_owned(),
        gpus: vec![gpu(0, &[0, 3]), gpu(1, &[1, 3]), gpu(2, &[2])],
        links: vec![
            link(LinkKind::Pcie),
            link(LinkKind::Pcie),
            link(LinkKind::Pcie),
            link(LinkKind::PcieUplink),
        ],
    }
}
