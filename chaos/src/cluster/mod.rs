//! A cluster of real processes on a ground: controllers and workers with their own data folders,
//! observed through the admin API as operators do.

mod caps;
mod cluster_process;
mod faults;
mod ground;
mod links;
mod plan;
mod ports;
mod process;
mod restarts;
mod start;
mod status;
mod test_cluster;
mod usage;

pub use self::caps::ConnectionCaps;
pub use self::cluster_process::ClusterProcess;
pub use self::ground::{Ground, GroundConfig, HarnessNamespace};
pub use self::plan::{ClusterPlan, FaultInjection, LinkMode, WorkerMachine};
pub(crate) use self::process::{descendants, is_alive, own_pid, signal};
pub use self::restarts::StartResult;
pub use self::status::{PATIENCE, StatusGoal};
pub(crate) use self::status::{until, until_within};
pub use self::test_cluster::TestCluster;
pub use self::usage::{ProcessUsage, ResidentMemory};
pub(crate) use self::usage::{descriptors_max, processor_time, reset_peak, shared_memory};
