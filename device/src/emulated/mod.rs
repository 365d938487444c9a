//! An emulated GPU, which needs no hardware.
//!
//! The GPU's memory is a memfd that the worker owns. An extent of physical memory is an extent of
//! this file, `map` is `mmap` with MAP_FIXED, and an access to bytes that are not loaded faults.
//!
//! Launches run the model on the CPU with rten. The weights of rten's model are views into the
//! region, so rten reads them from device memory only: a byte that changes there changes the result.
//!
//! A stream runs its work synchronously on the caller's thread. Work is therefore ordered by
//! construction, and an event has already happened when it is recorded.

mod module;
mod region;
mod value;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_types::{Bytes, DataType, Timestamp};
use rustix::fs::SealFlags;

use crate::api::{
    Capabilities, CopySource, Device, Event, HostTensor, InjectedFault, KernelSpec, LaunchArg, MemoryExtent,
    ModelCode, Stream, StreamThreads, TensorPart,
};
use crate::clock::monotonic_now;
use crate::error::Error;
use crate::map::page;
use crate::memfd;
use crate::memory::{HostAccess, HostRegion};

pub use module::{Kernel, Module};
pub use region::EmulatedRegion;
pub use value::EmulatedValue;

/// Value of [`Capabilities::copy_max`].
const COPY_MAX: Bytes = Bytes::mib(2);

/// An emulated GPU: memory in a memfd, launches on the CPU.
#[derive(Debug)]
pub struct EmulatedGpu {
    memory: Arc<OwnedFd>,
    bytes: Bytes,
    threads: Arc<rten::ThreadPool>,
    faults: Arc<Faults>,
}

/// The injected faults. A single-use fault is consumed by the first operation that checks its flag.
#[derive(Debug, Default)]
struct Faults {
    fail_copy: AtomicBool,
    fail_map: AtomicBool,
    exhaust_launch: AtomicBool,
    lost: AtomicBool,
    peers_lost: AtomicBool,
}

impl Faults {
    fn alive(&self) -> Result<(), Error> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::Lost("Xid 79 was injected: the GPU has fallen off the bus".to_owned()));
        }
        Ok(())
    }
}

/// A piece of an emulated GPU's memory.
#[derive(Debug, Clone)]
pub struct Chunk {
    file: Arc<OwnedFd>,
    extent: MemoryExtent,
}

impl EmulatedGpu {
    /// Opens a GPU on memory that a worker lent (see [`crate::DeviceMemory`]). Launches use `threads`
    /// threads.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if the memory does not have `bytes` bytes, or could shrink.
    pub fn new(memory: OwnedFd, bytes: Bytes, threads: NonZeroUsize) -> Result<Self, Error> {
        memfd::check_sealed(&memory, bytes.get(), SealFlags::empty())?;
        let threads = Arc::new(rten::ThreadPool::with_num_threads(threads.get()));
        Ok(Self { memory: Arc::new(memory), bytes, threads, faults: Arc::default() })
    }
}

fn check_extent(extent: MemoryExtent, memory: u64) -> Result<(), Error> {
    let MemoryExtent { offset, bytes } = extent;
    let problem = if !offset.is_multiple_of(page()) || !bytes.is_multiple_of(page()) {
        "not whole pages"
    } else if bytes == 0 {
        "empty"
    } else if offset.checked_add(bytes).is_none_or(|end| end > memory) {
        "past the end of the device's memory"
    } else {
        return Ok(());
    };
    Err(Error::BadExtent { offset, bytes, problem })
}

impl Device for EmulatedGpu {
    type Region = EmulatedRegion;
    type Chunk = Chunk;
    type Module = Module;
    type Kernel = Kernel;
    type Value = EmulatedValue;
    type Stream = EmulatedStream;

    fn capabilities(&self) -> Capabilities {
        Capabilities { memory: self.bytes, granularity: Bytes(page()), copy_max: COPY_MAX }
    }

    fn reserve(&self, bytes: Bytes) -> Result<EmulatedRegion, Error> {
        self.faults.alive()?;
        EmulatedRegion::new(bytes.get())
    }

    fn create(&self, extent: MemoryExtent) -> Result<Chunk, Error> {
        self.faults.alive()?;
        check_extent(extent, self.bytes.get())?;
        Ok(Chunk { file: Arc::clone(&self.memory), extent })
    }

    fn export(&self, chunk: &Chunk) -> Result<(OwnedFd, MemoryExtent), Error> {
        let file = chunk.file.try_clone().map_err(|source| Error::Os { what: "export a chunk", source })?;
        Ok((file, chunk.extent))
    }

    fn import(&self, file: OwnedFd, extent: MemoryExtent) -> Result<Chunk, Error> {
        self.faults.alive()?;
        let bytes = memfd::size(&file)?;
        memfd::check_sealed(&file, bytes, SealFlags::empty())?;
        check_extent(extent, bytes)?;
        Ok(Chunk { file: Arc::new(file), extent })
    }

    fn map(&self, region: &EmulatedRegion, chunks: Vec<(u64, Chunk)>) -> Result<(), Error> {
        self.faults.alive()?;
        if self.faults.fail_map.swap(false, Ordering::Relaxed) {
            return Err(Error::OutOfMemory("this fault was injected".to_owned()));
        }
        region.map(chunks)
    }

    fn unmap(&self, region: &EmulatedRegion) -> Result<(), Error> {
        region.unmap()
    }

    fn missing(&self, region: &EmulatedRegion, bytes: Range<u64>) -> Option<Range<u64>> {
        region.missing(bytes)
    }

    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<HostRegion, Error> {
        HostRegion::receive(file, bytes, access)
    }

    fn load(&self, region: &EmulatedRegion, code: ModelCode<'_>) -> Result<Module, Error> {
        self.faults.alive()?;
        Module::load(region, code)
    }

    fn kernel(&self, module: &Module, spec: &KernelSpec) -> Result<Kernel, Error> {
        module.kernel(spec)
    }

    fn stream(&self, width: StreamThreads) -> Result<EmulatedStream, Error> {
        self.faults.alive()?;
        let threads = match width {
            StreamThreads::One => Arc::new(rten::ThreadPool::with_num_threads(1)),
            StreamThreads::Whole => Arc::clone(&self.threads),
        };
        Ok(EmulatedStream { threads, faults: Arc::clone(&self.faults), staging: Vec::new() })
    }

    /// Runs `body` on a thread of the stream's pool, so that a launch need not switch to one.
    fn enter<R: Send>(&self, stream: EmulatedStream, body: impl FnOnce(EmulatedStream) -> R + Send) -> R {
        let threads = Arc::clone(&stream.threads);
        threads.run(|| body(stream))
    }

    fn inject(&self, fault: InjectedFault<'_, EmulatedRegion>) -> Result<(), Error> {
        match fault {
            InjectedFault::FailNextCopy => self.faults.fail_copy.store(true, Ordering::Relaxed),
            InjectedFault::FailNextMap => self.faults.fail_map.store(true, Ordering::Relaxed),
            InjectedFault::ExhaustNextLaunch => self.faults.exhaust_launch.store(true, Ordering::Relaxed),
            InjectedFault::Lose => self.faults.lost.store(true, Ordering::Relaxed),
            InjectedFault::LosePeers => self.faults.peers_lost.store(true, Ordering::Relaxed),
            InjectedFault::Corrupt(region) => return region.corrupt(),
        }
        Ok(())
    }
}

/// A stream of an emulated GPU. Work runs synchronously on the caller's thread.
#[derive(Debug)]
pub struct EmulatedStream {
    threads: Arc<rten::ThreadPool>,
    faults: Arc<Faults>,
    /// Intermediate buffer for copies from another GPU, from pageable memory or from a file.
    staging: Vec<u8>,
}

impl EmulatedStream {
    /// Checks that a copy of these bytes may begin, and returns their number.
    fn begin_copy(&self, bytes: &Range<u64>) -> Result<u64, Error> {
        let length = bytes.end.saturating_sub(bytes.start);
        if length > COPY_MAX.get() {
            let problem = "more than one copy may move";
            return Err(Error::BadExtent { offset: bytes.start, bytes: length, problem });
        }
        self.may_copy()?;
        Ok(length)
    }

    fn may_copy(&self) -> Result<(), Error> {
        self.faults.alive()?;
        if self.faults.fail_copy.swap(false, Ordering::Relaxed) {
            return Err(Error::CopyFailed("this fault was injected".to_owned()));
        }
        Ok(())
    }
}

impl Stream<EmulatedGpu> for EmulatedStream {
    type Event = PastEvent;

    fn copy(&mut self, region: &EmulatedRegion, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error> {
        let length = self.begin_copy(&bytes)?;
        let source = region::part(host.as_slice(), &bytes)?;
        match host.access() {
            HostAccess::Direct => region.fill_from(source, bytes),
            HostAccess::Buffered => {
                // The length is at most COPY_MAX, so the cast is lossless.
                self.staging.resize(length as usize, 0);
                self.staging.copy_from_slice(source);
                region.fill_from(&self.staging, bytes)
            }
        }
    }

    fn copy_from_peer(
        &mut self,
        region: &EmulatedRegion,
        peer: &Chunk,
        offset: u64,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        let length = self.begin_copy(&bytes)?;
        if self.faults.peers_lost.load(Ordering::Relaxed) {
            return Err(Error::PeerLost("this fault was injected".to_owned()));
        }
        if offset.checked_add(length).is_none_or(|end| end > peer.extent.bytes) {
            let problem = "past the end of the other device's memory";
            return Err(Error::BadExtent { offset, bytes: length, problem });
        }
        // The length is at most COPY_MAX, so the cast is lossless. The peer's memory is read and not
        // mapped, because its owner may write to it at any time.
        self.staging.resize(length as usize, 0);
        memfd::read_at(&peer.file, &mut self.staging, peer.extent.offset + offset)?;
        region.fill_from(&self.staging, bytes)
    }

    fn copy_from_file(
        &mut self,
        region: &EmulatedRegion,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        let length = self.begin_copy(&bytes)?;
        // The length is at most COPY_MAX, so the cast is lossless. The file is read and not mapped,
        // because other processes may write to it at any time.
        self.staging.resize(length as usize, 0);
        memfd::read_at(file, &mut self.staging, bytes.start)?;
        region.fill_from(&self.staging, bytes)
    }

    fn fill(
        &mut self,
        region: &EmulatedRegion,
        value: &EmulatedValue,
        datatype: DataType,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        self.may_copy()?;
        let source = value.bytes(datatype, &bytes)?;
        region.fill_from(&source, 0..source.len() as u64)
    }

    fn copy_out(
        &mut self,
        source: CopySource<'_, EmulatedGpu>,
        bytes: Range<u64>,
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), Error> {
        self.begin_copy(&bytes)?;
        match source {
            CopySource::Region(region) => memfd::write_at(file, region.hold(bytes)?.as_slice(), at),
            CopySource::Value(value, datatype) => memfd::write_at(file, &value.bytes(datatype, &bytes)?, at),
        }
    }

    fn launch(
        &mut self,
        module: &Module,
        kernel: &Kernel,
        args: Vec<LaunchArg<'_, EmulatedValue>>,
    ) -> Result<Vec<EmulatedValue>, Error> {
        self.faults.alive()?;
        if self.faults.exhaust_launch.swap(false, Ordering::Relaxed) {
            return Err(Error::OutOfMemory("this fault was injected".to_owned()));
        }
        let options = rten::RunOptions::default().with_thread_pool(Some(Arc::clone(&self.threads)));
        let values = module.launch(kernel, args, options)?;
        // A launch on a device that was lost in the meantime returns no results.
        self.faults.alive()?;
        Ok(values)
    }

    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<TensorPart<'_, EmulatedRegion>>,
    ) -> Result<EmulatedValue, Error> {
        self.faults.alive()?;
        EmulatedValue::gather(datatype, &shape, parts)
    }

    fn view_region(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &EmulatedRegion,
        bytes: Range<u64>,
    ) -> Result<EmulatedValue, Error> {
        self.faults.alive()?;
        EmulatedValue::in_place(datatype, &shape, region, bytes)
    }

    fn detach(&mut self, value: EmulatedValue) -> EmulatedValue {
        value.detached()
    }

    fn shape(&self, value: &EmulatedValue, datatype: DataType) -> Result<Vec<usize>, Error> {
        value.shape(datatype)
    }

    fn download(
        &mut self,
        value: &EmulatedValue,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error> {
        self.faults.alive()?;
        value.download(datatype, inline_max)
    }

    fn record(&mut self) -> Result<PastEvent, Error> {
        self.faults.alive()?;
        Ok(PastEvent(monotonic_now()))
    }
}

/// A recorded point of an emulated stream, which has already been reached.
#[derive(Debug)]
pub struct PastEvent(Timestamp);

impl Event for PastEvent {
    fn wait(self) -> Result<Timestamp, Error> {
        Ok(self.0)
    }
}
