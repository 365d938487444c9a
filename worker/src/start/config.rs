//! The configuration of a worker, and the errors of the start.

use std::net::SocketAddr;
use std::path::PathBuf;

use millrace_gpu::isolation::ExecutorIsolation;
use millrace_nodes::index::LookupOrder;
use millrace_proto::trace::SpanRing;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_types::topology::Topology;
use millrace_types::{Bytes, NodeName};

use crate::data_dir;
use crate::faults::InjectedFaults;
use crate::node_config::DataConfig;
use crate::process_port::{ExecutorCommand, ExecutorDevice, ExecutorEngine};
use crate::programs::ProgramLauncher;
use crate::service::ServiceLimits;

/// The configuration of a worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Name of the node, unique in the cluster.
    pub node: NodeName,
    /// Directory for artifacts and the node's identity. No other worker may use this directory.
    pub data_dir: PathBuf,
    /// Address on which the service listens; with port 0, any free port.
    pub listen: SocketAddr,
    /// Address at which gateways reach the service; `None`: the listening address.
    pub advertise: Option<String>,
    /// Addresses of all controllers, as `host:port`.
    pub controllers: Vec<String>,
    pub topology: Topology,
    /// Maximum host memory of models.
    pub host_memory: Bytes,
    /// Maximum memory of objects, the intermediate data of workflows, on GPUs and the host
    /// together.
    pub object_memory: Bytes,
    /// Maximum size of all models that the node accepts, at least `host_memory`. Models that do not
    /// fit in host memory stay on the node's disk.
    pub model_storage: Bytes,
    /// The limits and the policies of intermediate data on GPUs.
    pub gpu_data: DataConfig,
    /// Command that starts an executor.
    pub executor: ExecutorCommand,
    /// Launcher of users' programs; `None`: programs are refused.
    pub programs: Option<ProgramLauncher>,
    /// The scheduling policy until a controller reports the operators' policy.
    pub policy: SchedulingPolicy,
    /// The models that share an executor process.
    pub isolation: ExecutorIsolation,
    /// The engine that executors run models with.
    pub engine: ExecutorEngine,
    /// The kind of GPUs. The topology describes them.
    pub device: ExecutorDevice,
    /// The first place to ask for data that a program names and this worker does not have.
    pub lookup: LookupOrder,
    /// Number of threads for one executor's launches.
    pub executor_threads: u32,
    /// Whether faults may be injected.
    pub faults: InjectedFaults,
    /// Seed of the delays before retries and reconnections, which makes them repeatable.
    pub seed: u64,
    pub limits: ServiceLimits,
    /// Store of this process's trace spans, if the process has a store.
    pub kept: Option<SpanRing>,
}

/// The reason why a worker did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data directory cannot be used.
    #[error("data directory: {0}")]
    DataDir(#[from] data_dir::Error),
    /// The artifact store cannot be opened.
    #[error("artifacts: {0}")]
    Store(#[from] millrace_storage::Error),
    /// The folder of programs cannot be opened.
    #[error("cannot open the folder of programs: {0}")]
    Programs(std::io::Error),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another address, or port 0 for a free port")]
    Listen {
        address: SocketAddr,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The address of a controller is invalid.
    #[error("controller address {address:?} is invalid ({source}): write host:port")]
    Controller {
        address: String,
        /// Description of the fault.
        source: tonic::transport::Error,
    },
    /// The operating system could not start a thread.
    #[error("cannot start the actor thread: {0}")]
    Thread(std::io::Error),
    /// The actor thread ended during its start.
    #[error("the node's actors did not start: see the worker's log")]
    Actors,
}
