//! A CUDA GPU, through the driver API.
//!
//! | module | holds |
//! |---|---|
//! | `gpu` | [`CudaGpu`]: the device |
//! | `stream` | [`CudaStream`]: copies between host and GPU |
//! | `event` | [`CudaEvent`]: points in a stream |
//! | `region` | [`CudaRegion`]: addresses, their mappings, and which bytes are loaded |
//! | `mapper` | the thread that maps and unmaps regions |
//! | `shared` | what the device and its streams share |
//! | `pool` | the GPU's memory, in handles of a block each |
//! | `driver` | the driver's functions behind owned values: contexts, memory, streams, kernels, green contexts |
//!
//! The driver is opened at run time. Nothing here needs a toolkit or a driver to build.

pub(crate) mod driver;
mod event;
mod gpu;
mod mapper;
mod pool;
mod region;
mod shared;
mod stream;

pub use driver::DriverMissing;
pub use event::CudaEvent;
pub use gpu::CudaGpu;
pub use pool::{BLOCK, CudaChunk};
pub use region::{CudaRegion, CudaRegionPin};
pub use stream::{CudaStream, GpuBytes};

/// Opens the driver, and checks that it shows a GPU.
///
/// # Errors
/// [`DriverMissing`].
pub fn present() -> Result<(), DriverMissing> {
    driver::Gpu::all().map(drop)
}
