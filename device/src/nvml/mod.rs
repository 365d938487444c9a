//! NVIDIA's management library: finds the GPUs of this machine, and watches their health.
//!
//! ```text
//! libnvidia-ml.so.1 ── read ──► Machine ── discover ──► Discovery (a Topology, and each GPU's UUID, CPUs, node)
//!          │                       ▲
//!          │                       └── a recorded JSON file
//!          ├── health ──► HealthEvent   (a thread, until the HealthWatch is dropped)
//!          └── health ──► GpuSample     (on request)
//! ```
//!
//! | file | job |
//! |---|---|
//! | `record.rs` | [`Machine`]: the answers of NVML as plain data, as a record in JSON too |
//! | `read.rs` | reads a [`Machine`] from NVML |
//! | `discover.rs` | pure: turns a [`Machine`] into a topology |
//! | `health.rs` | Xids and ECC errors as events, and samples of load, temperature and power |
//! | `raw.rs` | the functions of NVML that nvml-wrapper lacks or breaks |
//!
//! NVML is opened at run time, so a build needs no driver. This module never loads libcuda: a worker
//! uses NVML, and only its executors have a CUDA context. Nothing here changes a setting of a GPU.
//!
//! # Tests on hardware
//! An H100 has answered `read.rs` (`topology/recorded/h100.json`). The other records in
//! `topology/recorded/` are written by hand, and `tests/nvml_calls.rs` runs the calls on a fake library
//! that follows nvml.h.

mod discover;
mod error;
mod health;
mod raw;
mod read;
mod record;

pub use discover::{DiscoveredGpu, Discovery, ExcludedGpu, discover, gpu_type};
pub use error::{DRIVER_MIN, Error};
pub use health::{
    GpuFault, GpuSample, GpuVerdict, HealthEvent, HealthWatch, RecoveryAction, is_program_fault, verdict,
};
pub use read::{Nvml, machine};
pub use record::{
    CPUS_MAX, CpuList, Fabric, FabricState, GpuRecord, Machine, MigInstance, NvLink, P2pStatus,
    ParseCpuListError, PcieAncestor, PeerRecord, RecordFormat, RemoteKind, UnreadableGpu,
};
