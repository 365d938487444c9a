//! The GPUs that a worker's executors drive.

use std::num::NonZeroUsize;

use millrace_device::cuda;
use millrace_memory::BlockSize;
use millrace_model::Grouping;
use millrace_proto::executor::Device;
use millrace_types::GpuIndex;

/// Value of [`ExecutorDevice::launches_max`] for CUDA.
const CUDA_LAUNCHES_MAX: NonZeroUsize = NonZeroUsize::new(4).expect("not zero");

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

    /// Returns the most launches of a model. On CUDA each launch is a session of ONNX Runtime, which takes
    /// about 30 ms to make and 60 ms to run for the first time, so few launches share the copies of a swap.
    #[must_use]
    pub fn launches_max(&self) -> NonZeroUsize {
        match self {
            Self::Emulated => Grouping::default().launches_max,
            Self::Cuda { .. } => CUDA_LAUNCHES_MAX,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_executor_sees_only_its_own_cuda_gpu() {
        let cuda = ExecutorDevice::Cuda { uuids: vec!["GPU-a".to_owned(), "GPU-b".to_owned()] };
        let variables = cuda.variables(GpuIndex(1));
        assert!(variables.contains(&("CUDA_VISIBLE_DEVICES", "GPU-b".to_owned())), "{variables:?}");
        assert_eq!(cuda.block().get(), cuda::BLOCK);
        assert!(ExecutorDevice::Emulated.variables(GpuIndex(1)).is_empty());
    }
}
