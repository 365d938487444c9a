//! The GPUs of a worker: those of this machine, or emulated ones.

use std::num::NonZeroU32;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use millrace_device::cuda;
use millrace_device::nvml;
use millrace_device::topology::{DEFAULT_PRESET, preset_names};
use millrace_types::Bytes;
use millrace_types::topology::Topology;
use millrace_worker::start::{ExecutorDevice, ExecutorEngine};

use crate::failure::CommandFailure;

/// The choice of a worker's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// This machine's GPUs if the machine has all that CUDA needs, else emulated ones.
    Auto,
    /// This machine's GPUs.
    Cuda,
    /// Emulated GPUs and links, of the preset with this name.
    Emulated(String),
}

impl DeviceChoice {
    /// Returns the parser of `--device`.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Self> {
        let names = [AUTO, CUDA].into_iter().chain(preset_names());
        PossibleValuesParser::new(names).map(|name| match name.as_str() {
            AUTO => Self::Auto,
            CUDA => Self::Cuda,
            _ => Self::Emulated(name),
        })
    }

    /// Returns the name of the preset that describes emulated GPUs under this choice.
    pub(crate) fn topology(&self) -> &str {
        match self {
            Self::Auto | Self::Cuda => DEFAULT_PRESET,
            Self::Emulated(name) => name,
        }
    }
}

const AUTO: &str = "auto";
const CUDA: &str = "cuda";

/// Memory of a CUDA GPU that stays with the driver and the engine: contexts, modules and the memory of runs.
/// With three small models, an H100 had 0.9 GiB in use beside the executor's own memory.
const ENGINE_MEMORY: Bytes = Bytes::gib(4);
/// Part of a CUDA GPU's memory that also stays free: a twentieth.
const SPARE: u64 = 20;

/// The GPUs of a worker, and what runs models on them.
#[derive(Debug, Clone)]
pub(crate) struct WorkerGpus {
    pub(crate) topology: Topology,
    pub(crate) device: ExecutorDevice,
    pub(crate) engine: ExecutorEngine,
}

/// The GPUs that a worker may use, and limits for them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuLimits {
    /// Most GPUs.
    pub(crate) gpus: Option<NonZeroU32>,
    /// Memory of each GPU for models and objects.
    pub(crate) memory: Option<Bytes>,
}

/// Finds the GPUs of this machine, and checks that an executor could use them.
pub(crate) fn cuda(limits: GpuLimits) -> Result<WorkerGpus, CommandFailure> {
    let found = nvml::machine().and_then(|machine| nvml::discover(&machine));
    let found = found.map_err(|error| CommandFailure::failed(error.to_string()).hint(error.hint()))?;
    millrace_executor::check_cuda_library().map_err(|error| {
        CommandFailure::failed(format!("--device cuda: {error}")).hint(format!(
            "install the Python package onnxruntime-gpu (1.24 or newer) and set {} to the \
             libonnxruntime.so in its folder capi, or start with --device emulated",
            millrace_executor::LIBRARY_VARIABLE
        ))
    })?;
    let mut topology = found.topology;
    let mut uuids: Vec<String> = found.gpus.into_iter().map(|gpu| gpu.uuid).collect();
    if let Some(gpus) = limits.gpus {
        let here = topology.gpus.len();
        topology = topology
            .first_gpus(gpus)
            .ok_or_else(|| CommandFailure::usage(format!("--gpus {gpus}: this machine has {here}")))?;
        uuids.truncate(topology.gpus.len());
    }
    for gpu in &mut topology.gpus {
        let most = gpu.memory.saturating_sub(ENGINE_MEMORY);
        let most = most.saturating_sub(Bytes(most.get() / SPARE));
        let asked = limits.memory.unwrap_or(most);
        let memory = Bytes(asked.get() / cuda::BLOCK.get() * cuda::BLOCK.get());
        if memory > most || memory == Bytes::ZERO {
            return Err(CommandFailure::usage(format!(
                "--gpu-memory {asked}: a GPU of {} has {most} for models, in blocks of {}",
                gpu.memory,
                cuda::BLOCK
            )));
        }
        gpu.memory = memory;
    }
    Ok(WorkerGpus { topology, device: ExecutorDevice::Cuda { uuids }, engine: ExecutorEngine::Ort })
}
