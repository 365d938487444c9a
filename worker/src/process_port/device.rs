//! The GPUs that a worker's executors drive.

use millrace_device::cuda;
use millrace_memory::BlockSize;
use millrace_proto::executor::Device;
use millrace_types::GpuIndex;

/// The GPUs of a worker's executors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ExecutorDevice {
    /// Emulated GPUs, whose memory is memory of this machine.
    #[default]
    Emulated,
    /// GPUs behind the CUDA driver.
    Cuda {
        /// UUID of each GPU, in the order of the topology.
        uuids: Vec<String>,
    },
}

impl ExecutorDevice {
    /// Returns the unit of a GPU's memory: models and objects take whole blocks.
    #[must_use]
    pub fn block(&self) -> BlockSize {
        match self {
            Self::Emulated => BlockSize::DEFAULT,
            Self::Cuda { .. } => BlockSize::new(cuda::BLOCK).expect("a CUDA block is a multiple of a chunk"),
        }
    }

    /// Returns the device's number in messages to executors.
    pub(super) fn wire(&self) -> Device {
        match self {
            Self::Emulated => Device::Emulated,
            Self::Cuda { .. } => Device::Cuda,
        }
    }

    /// Returns the environment variables by which the driver shows a GPU's executor only its GPU.
    pub(super) fn variables(&self, gpu: GpuIndex) -> Vec<(&'static str, String)> {
        let Self::Cuda { uuids } = self else { return Vec::new() };
        let uuid = uuids.get(gpu.0 as usize).cloned().unwrap_or_default();
        vec![("CUDA_VISIBLE_DEVICES", uuid), ("CUDA_MODULE_LOADING", "LAZY".to_owned())]
    }
}

impl std::fmt::Display for ExecutorDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Emulated => "emulated",
            Self::Cuda { .. } => "cuda",
        })
    }
}
