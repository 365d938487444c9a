//! A context with kernels, and memory that outlives the work of its check. The owners of memory wait
//! for all work of the context before they release the memory, so that checks may queue work freely.
#![allow(unsafe_code, reason = "queues work on memory that the values below keep")]

use std::time::Duration;

use crate::clock::monotonic_now;
use crate::cuda::driver::context::WaitMode;
use crate::cuda::driver::kernels::Grid;
use crate::cuda::driver::stream::StreamPriority;
use crate::cuda::driver::{
    AddressRange, Context, Gpu, Kernels, MemoryHandle, PinnedBuffer, RawEvent, RawStream,
};
use crate::error::DriverError;

use super::finding::CheckError;

/// Bytes of a handle: the driver's granularity.
pub(super) const BLOCK: u64 = 2 << 20;

/// The first GPU, with kernels and a stream.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) stream: RawStream,
    pub(super) kernels: Kernels,
    pub(super) context: Context,
}

/// Returns the first GPU.
pub(super) fn first_gpu() -> Result<Gpu, CheckError> {
    let gpus = Gpu::all()?;
    gpus.first().copied().ok_or_else(|| CheckError::Wrong("the driver shows no GPU".to_owned()))
}

impl Bench {
    pub(super) fn new() -> Result<Self, CheckError> {
        let context = Context::open(first_gpu()?, WaitMode::Spin)?;
        let kernels = Kernels::load(&context)?;
        let stream = RawStream::new(&context, StreamPriority::Normal)?;
        Ok(Self { stream, kernels, context })
    }

    pub(super) fn gpu(&self) -> Gpu {
        self.context.gpu()
    }

    /// Creates a stream for copies.
    pub(super) fn copy_stream(&self) -> Result<RawStream, DriverError> {
        RawStream::new(&self.context, StreamPriority::High)
    }

    /// Writes the words of a seed to a buffer, and waits.
    pub(super) fn write(&self, buffer: &GpuBuffer, seed: u64) -> Result<(), DriverError> {
        // SAFETY: the buffer waits for the context before it goes.
        unsafe { self.kernels.pattern(&self.stream, buffer.base(), buffer.bytes(), seed)? };
        self.stream.synchronize()
    }

    /// Returns the number of words of a range that differ from those of a seed.
    pub(super) fn differing(&self, at: u64, bytes: u64, seed: u64) -> Result<u64, CheckError> {
        let count = PinnedBuffer::new(8)?;
        // SAFETY: the range is that of a buffer of the check; the result is awaited here.
        unsafe { self.kernels.check(&self.stream, at, bytes, seed, count.device_address()?)? };
        self.stream.synchronize()?;
        Ok(u64::from_le_bytes(count.as_slice().try_into().expect("the buffer has 8 bytes")))
    }

    /// Runs `queue` once to warm up and `rounds` times for the measurement, and returns the median
    /// time by the GPU's clock.
    pub(super) fn gpu_time(
        &self,
        stream: &RawStream,
        rounds: usize,
        mut queue: impl FnMut() -> Result<(), DriverError>,
    ) -> Result<Duration, DriverError> {
        let mut times = Vec::with_capacity(rounds);
        for round in 0..=rounds {
            let began = stream.record()?;
            queue()?;
            let ended = stream.record()?;
            ended.wait()?;
            if round > 0 {
                times.push(ended.since(&began)?);
            }
        }
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }

    /// Returns the rate of pinned copies to the GPU in GB/s: the ceiling of all copies to the GPU.
    pub(super) fn ceiling_to_gpu(&self) -> Result<f64, CheckError> {
        const BYTES: usize = 256 << 20;
        let host = PinnedBuffer::new(BYTES)?;
        let buffer = GpuBuffer::new(self, BYTES as u64)?;
        let stream = self.copy_stream()?;
        // SAFETY: the buffers stay until the end of the function, which waits for the copies.
        let time =
            self.gpu_time(&stream, 5, || unsafe { stream.copy_to_gpu(buffer.base(), host.as_slice()) })?;
        Ok(super::finding::rate(BYTES as u64, time))
    }
}

/// Runs `work` and returns its time by the host's clock.
pub(super) fn host_time<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(T, Duration), E> {
    let began = monotonic_now();
    let result = work()?;
    Ok((result, monotonic_now().since(began)))
}

/// Mapped memory of the GPU.
#[derive(Debug)]
pub(super) struct GpuBuffer {
    range: Option<AddressRange>,
    context: Context,
}

impl GpuBuffer {
    /// Takes whole blocks, at least `bytes`.
    pub(super) fn new(bench: &Bench, bytes: u64) -> Result<Self, DriverError> {
        let bytes = bytes.next_multiple_of(BLOCK);
        let handles: Result<Vec<_>, _> =
            (0..bytes / BLOCK).map(|_| MemoryHandle::create(bench.gpu(), BLOCK)).collect();
        Self::of(&bench.context, &handles?)
    }

    /// Maps these handles, one after another.
    pub(super) fn of(context: &Context, handles: &[MemoryHandle]) -> Result<Self, DriverError> {
        let bytes = handles.iter().map(MemoryHandle::bytes).sum();
        let mut range = AddressRange::reserve(bytes, 0)?;
        let mut at = 0;
        for handle in handles {
            range.map(at, handle)?;
            at += handle.bytes();
        }
        range.open(0, bytes, context.gpu())?;
        Ok(Self { range: Some(range), context: context.clone() })
    }

    fn range(&self) -> &AddressRange {
        self.range.as_ref().expect("only drop takes the range")
    }

    pub(super) fn base(&self) -> u64 {
        self.range().base()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.range().bytes()
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        // Work may still name the memory. A lost context has no work.
        if let Err(error) = self.context.synchronize() {
            eprintln!("gpu-check: {error}");
        }
        self.range = None;
    }
}

/// Returns a grid that fills this many SMs with `per_sm` blocks each.
pub(super) fn grid(sms: u32, per_sm: u32) -> Grid {
    Grid { blocks: sms * per_sm, threads: 256 }
}

/// Returns the time from one event to another, after both.
pub(super) fn between(began: &RawEvent, ended: &RawEvent) -> Result<Duration, DriverError> {
    ended.wait()?;
    ended.since(began)
}
