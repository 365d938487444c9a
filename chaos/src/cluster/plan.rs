//! The plan of a cluster: the numbers of processes, the links, the faults and the resources.

use super::caps::ConnectionCaps;

/// The cluster to start.
#[derive(Debug, Clone)]
pub struct ClusterPlan {
    /// Number of voters.
    pub controllers: u64,
    /// Number of workers.
    pub workers: u32,
    /// Whether processes reach each other through proxies.
    pub links: LinkMode,
    /// Whether controllers serve the fault service.
    pub injection: FaultInjection,
    pub machine: WorkerMachine,
    /// Further arguments of the workers.
    pub worker_words: Vec<String>,
    /// The preset with which the cluster starts; `None` for the default.
    pub preset: Option<String>,
    /// Connection limits of the servers; `None` leaves the servers' defaults.
    pub caps: Option<ConnectionCaps>,
    /// The soft limit of descriptors of each process; `None` for the harness's own limit.
    pub descriptors: Option<u64>,
}

/// The resources of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerMachine {
    /// Number of emulated GPUs.
    pub gpus: u32,
    /// Bytes of memory of each GPU.
    pub gpu_memory: u64,
    /// Bytes of host memory for models.
    pub host_memory: u64,
}

impl WorkerMachine {
    pub(super) fn words(self) -> Vec<String> {
        let Self { gpus, gpu_memory, host_memory } = self;
        let sizes =
            [("--gpus", u64::from(gpus)), ("--gpu-memory", gpu_memory), ("--host-memory", host_memory)];
        sizes.into_iter().flat_map(|(flag, size)| [flag.to_owned(), size.to_string()]).collect()
    }
}

/// The way in which processes reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkMode {
    /// Processes connect directly. A ground that can cuts links.
    Direct,
    /// Processes connect through proxies, which cut and delay.
    Proxied,
}

/// Whether controllers run the fault service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FaultInjection {
    /// Controllers run without the fault service.
    #[default]
    Off,
    /// Controllers run the fault service.
    On,
}

impl FaultInjection {
    /// Returns the controller's arguments for the fault service.
    pub(super) fn words(self) -> Vec<String> {
        match self {
            Self::Off => Vec::new(),
            Self::On => vec!["--enable-fault-injection".to_owned()],
        }
    }
}
