//! The device: a GPU with its pool.
#![allow(unsafe_code, reason = "registers host memory, and corrupts bytes for tests")]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_types::Bytes;

use super::driver::context::WaitMode;
use super::driver::{Context, Gpu, Kernels, RawStream, Registration, stream::StreamPriority};
use super::event::CudaEvent;
use super::mapper::Mapper;
use super::pool::{BLOCK, CudaChunk, Pool};
use super::region::CudaRegion;
use super::shared::{COPY_MAX, Shared};
use super::stream::{CudaStream, GpuBytes};
use crate::api::{Capabilities, Device, InjectedFault, MemoryExtent, MissingBytes};
use crate::error::{DriverError, Error};
use crate::memory::{HostAccess, HostRegion};

/// Bytes that an injected fault changes.
const CORRUPTED_BYTES: u64 = 4096;

/// A GPU behind the CUDA driver.
#[derive(Debug)]
pub struct CudaGpu {
    pool: Arc<Pool>,
    mapper: Mapper,
    shared: Arc<Shared>,
}

impl CudaGpu {
    /// Opens the first GPU that the driver shows to this process, and takes whole blocks of its memory.
    /// What is left is for the context, and for the memory that engines take by themselves.
    ///
    /// # Errors
    /// [`Error::Lost`] without a driver or a GPU, [`Error::OutOfMemory`] if less memory is free.
    pub fn open(memory: Bytes) -> Result<Self, Error> {
        let gpu = Gpu::all()?.first().copied();
        let gpu = gpu.ok_or_else(|| Error::Lost("the driver shows no GPU".to_owned()))?;
        let context = Context::open(gpu, WaitMode::Block)?;
        let pool = Pool::take(&context, memory)?;
        let mapper = Mapper::start(&context)?;
        let shared = Arc::new(Shared::new(context));
        Ok(Self { pool: Arc::new(pool), mapper, shared })
    }

    /// Returns the number by which the driver, and libraries over it, know the GPU.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.shared.context().gpu().ordinal()
    }

    /// Returns the name of the GPU.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn name(&self) -> Result<String, Error> {
        Ok(self.shared.context().gpu().name()?)
    }

    /// Makes the GPU current on this thread, and fails if it is lost. An engine calls this before it
    /// works without a stream.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::ContextLost`].
    pub fn enter(&self) -> Result<(), Error> {
        self.shared.faults.alive()?;
        Ok(self.shared.context().enter()?)
    }

    /// Changes the first loaded bytes of a region.
    fn corrupt(&self, region: &CudaRegion) -> Result<(), Error> {
        let piece = region.first_loaded().ok_or(Error::NotMapped(0..region.bytes()))?;
        let bytes = (piece.bytes.end - piece.bytes.start).min(CORRUPTED_BYTES) / 4 * 4;
        let corrupt = || -> Result<(), DriverError> {
            let context = self.shared.context();
            let kernels = Kernels::load(context)?;
            let stream = RawStream::new(context, StreamPriority::Normal)?;
            // SAFETY: the pool keeps the memory, and the work is awaited.
            unsafe { kernels.xor(&stream, piece.address, bytes, 0x5555_5555)? };
            stream.synchronize()
        };
        Ok(corrupt()?)
    }
}

impl Device for CudaGpu {
    type Region = CudaRegion;
    type Chunk = CudaChunk;
    type Bytes<'a> = GpuBytes<'a>;
    type Event = CudaEvent;
    type Stream = CudaStream;

    fn capabilities(&self) -> Capabilities {
        Capabilities { memory: self.pool.bytes(), granularity: BLOCK, copy_max: COPY_MAX }
    }

    fn reserve(&self, bytes: Bytes) -> Result<CudaRegion, Error> {
        self.enter()?;
        CudaRegion::new(&self.pool, &self.mapper, bytes.get())
    }

    fn create(&self, extent: MemoryExtent) -> Result<CudaChunk, Error> {
        self.shared.faults.alive()?;
        self.pool.check(extent)?;
        Ok(CudaChunk { extent })
    }

    fn export(&self, _chunk: &CudaChunk) -> Result<(OwnedFd, MemoryExtent), Error> {
        Err(Error::Unsupported("exporting memory to another GPU"))
    }

    fn import(&self, _file: OwnedFd, _extent: MemoryExtent) -> Result<CudaChunk, Error> {
        Err(Error::Unsupported("importing memory of another GPU"))
    }

    fn map(&self, region: &CudaRegion, chunks: Vec<(u64, CudaChunk)>) -> Result<(), Error> {
        self.enter()?;
        if self.shared.faults.fail_map.swap(false, Ordering::Relaxed) {
            return Err(Error::OutOfMemory("this fault was injected".to_owned()));
        }
        region.map(chunks)
    }

    fn unmap(&self, region: &CudaRegion) -> Result<(), Error> {
        self.enter()?;
        region.unmap()
    }

    fn missing(&self, region: &CudaRegion, bytes: Range<u64>) -> Option<MissingBytes<CudaEvent>> {
        region.missing(bytes)
    }

    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<HostRegion, Error> {
        let host = HostRegion::receive(file, bytes, access)?;
        if access == HostAccess::Direct && bytes > Bytes::ZERO {
            self.enter()?;
            let memory = host.as_slice();
            // SAFETY: the registration is attached to the region, which drops it before the mapping.
            match unsafe { Registration::new(memory.as_ptr(), memory.len(), false) } {
                Ok(registration) => host.attach(Box::new(registration)),
                // The memory cannot be locked, or the limit is reached: copies pass through the ring.
                Err(error) => eprintln!(
                    "millrace executor: host memory cannot be registered with the driver, so copies from it pass through pinned buffers: {error}"
                ),
            }
        }
        Ok(host)
    }

    fn stream(&self) -> Result<CudaStream, Error> {
        self.enter()?;
        CudaStream::new(&self.shared)
    }

    fn inject(&self, fault: InjectedFault<'_, CudaRegion>) -> Result<(), Error> {
        self.shared.faults.inject(fault, |region| self.corrupt(region))
    }
}
