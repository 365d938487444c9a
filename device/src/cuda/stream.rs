//! Streams: copies between host and GPU, and the events after them.
#![allow(unsafe_code, reason = "queues copies of memory that is kept until they have finished")]

use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use millrace_types::slices::SmShare;

use super::driver::stream::StreamPriority;
use super::driver::{Context, PinnedBuffer, RawEvent, RawStream};
use super::event::CudaEvent;
use super::pool::CudaChunk;
use super::region::{CudaRegion, CudaRegionPin, Piece};
use super::shared::{COPY_MAX, Shared};
use crate::api::{CopySource, Device, Stream};
use crate::error::Error;
use crate::memfd;
use crate::memory::HostRegion;

/// Number of pinned buffers of a stream, each as long as the largest copy.
const RING: usize = 2;

/// Bytes of the GPU's memory that an engine owns, and lends for a copy.
#[derive(Debug, Clone, Copy)]
pub struct GpuBytes<'a> {
    address: u64,
    bytes: u64,
    owner: PhantomData<&'a [u8]>,
}

impl GpuBytes<'_> {
    /// Names bytes of the GPU's memory.
    ///
    /// # Safety
    /// The bytes stay for the lifetime, and all work that writes to them has finished.
    #[must_use]
    pub unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes, owner: PhantomData }
    }
}

/// A stream of a CUDA GPU.
#[derive(Debug)]
pub struct CudaStream {
    /// Before the ring, because a stream ends before the buffers of its copies. Shared with the pins
    /// of launches in this stream.
    raw: Arc<RawStream>,
    shared: Arc<Shared>,
    ring: Ring,
}

/// Pinned buffers, through which copies from and to other memory pass. Each has the event after which
/// it may be used again.
#[derive(Debug, Default)]
struct Ring {
    buffers: Vec<(PinnedBuffer, Option<RawEvent>)>,
    next: usize,
}

impl Ring {
    /// Returns a buffer that no copy uses.
    fn free(&mut self) -> Result<&mut (PinnedBuffer, Option<RawEvent>), Error> {
        if self.buffers.len() < RING {
            self.buffers.push((PinnedBuffer::new(COPY_MAX.get() as usize)?, None));
            self.next = self.buffers.len() - 1;
        } else {
            self.next = (self.next + 1) % RING;
        }
        let slot = &mut self.buffers[self.next];
        if let Some(event) = slot.1.take() {
            event.wait()?;
        }
        Ok(slot)
    }
}

impl CudaStream {
    pub(super) fn new(shared: &Arc<Shared>) -> Result<Self, Error> {
        let raw = RawStream::new(shared.context(), StreamPriority::High)?;
        Ok(Self { raw: Arc::new(raw), shared: Arc::clone(shared), ring: Ring::default() })
    }

    /// Returns the driver's address of the stream, for an engine that queues its launches here.
    #[must_use]
    pub fn address(&self) -> usize {
        self.raw.address()
    }

    /// Makes the GPU current on this thread, and fails if a launch may not begin: the GPU is lost, or
    /// a fault was injected. An engine calls this before a launch.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::ContextLost`], [`Error::OutOfMemory`].
    pub fn begin_launch(&mut self) -> Result<(), Error> {
        self.enter()?;
        self.shared.faults.may_launch()
    }

    /// Pins the region, so that work which is queued to this stream may read these bytes until the pin
    /// is dropped. The stream waits for the copies of the bytes, which were issued. The region stays
    /// mapped until the work that was queued while the pin lived has finished.
    ///
    /// # Errors
    /// [`Error::NotResident`]; the error of the mapping.
    pub fn pin(&mut self, region: &CudaRegion, bytes: &[Range<u64>]) -> Result<CudaRegionPin, Error> {
        self.enter()?;
        region.pin(&self.raw, bytes)
    }

    /// Copies host memory to memory of the GPU that an engine owns. The source may change when the
    /// call returns.
    ///
    /// # Safety
    /// The target stays until the work of the stream has finished.
    ///
    /// # Errors
    /// [`Error::ContextLost`], [`Error::Lost`].
    pub unsafe fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        self.enter()?;
        let most = COPY_MAX.get() as usize;
        for (at, part) in bytes.chunks(most).enumerate() {
            let (buffer, used) = self.ring.free()?;
            let buffer = &mut buffer.as_mut_slice()[..part.len()];
            buffer.copy_from_slice(part);
            // SAFETY: the buffer is not used again before its event; the caller keeps the target.
            unsafe { self.raw.copy_to_gpu(to + (at * most) as u64, buffer)? };
            *used = Some(self.raw.record()?);
        }
        Ok(())
    }

    /// Copies memory of the GPU to the host after the stream's earlier work, and waits for the copy.
    ///
    /// # Safety
    /// The source stays for the call.
    ///
    /// # Errors
    /// As [`Self::write`]; the errors of the earlier work.
    pub unsafe fn read(&mut self, from: u64, to: &mut [u8]) -> Result<(), Error> {
        self.enter()?;
        let most = COPY_MAX.get() as usize;
        for (at, part) in to.chunks_mut(most).enumerate() {
            let (buffer, _) = self.ring.free()?;
            let length = part.len() as u64;
            // SAFETY: the buffer has room for the largest copy, and the copy is awaited below.
            unsafe { self.raw.copy_to_host(buffer.as_ptr(), from + (at * most) as u64, length)? };
            self.raw.record()?.wait()?;
            part.copy_from_slice(&buffer.as_slice()[..part.len()]);
        }
        Ok(())
    }

    /// Copies memory of the GPU within the GPU.
    ///
    /// # Safety
    /// Both ranges stay until the work of the stream has finished.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub unsafe fn copy_within(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.raw.copy_on_gpu(to, from, bytes) }.map_err(Error::from)
    }

    /// Makes the GPU current on this thread.
    fn enter(&self) -> Result<&Context, Error> {
        self.shared.faults.alive()?;
        let context = self.shared.context();
        context.enter()?;
        Ok(context)
    }

    /// Checks that a copy of these bytes may begin.
    fn check_copy(&self, bytes: &Range<u64>) -> Result<(), Error> {
        let length = bytes.end.saturating_sub(bytes.start);
        if bytes.start > bytes.end || length > COPY_MAX.get() {
            let problem = "more than one copy may move";
            return Err(Error::BadExtent { offset: bytes.start, bytes: length, problem });
        }
        self.enter()?;
        self.shared.faults.may_copy()
    }

    /// Copies bytes to a region through the ring. `fill` writes them to a pinned buffer.
    fn through_ring(
        &mut self,
        region: &CudaRegion,
        bytes: Range<u64>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let length = (bytes.end - bytes.start) as usize;
        let (buffer, used) = self.ring.free()?;
        fill(&mut buffer.as_mut_slice()[..length])?;
        let source = &buffer.as_slice()[..length];
        let start = bytes.start;
        let raw = &self.raw;
        region.issue(raw, bytes, Box::new(()), |pieces| {
            // SAFETY: the buffer is not used again before its event, and lives as long as the stream.
            unsafe { copy_pieces(raw, pieces, start, source) }
        })?;
        *used = Some(self.raw.record()?);
        Ok(())
    }

    /// Copies memory of the GPU to a file, and waits: the bytes are in the file when the call returns.
    fn write_out(&mut self, pieces: &[(u64, u64)], file: BorrowedFd<'_>, mut at: u64) -> Result<(), Error> {
        for &(address, bytes) in pieces {
            let (buffer, _) = self.ring.free()?;
            // SAFETY: the buffer has room for the largest copy, and the copy is awaited below. The
            // caller keeps the source.
            unsafe { self.raw.copy_to_host(buffer.as_ptr(), address, bytes)? };
            self.raw.record()?.wait()?;
            memfd::write_at(file, &buffer.as_slice()[..bytes as usize], at)?;
            at += bytes;
        }
        Ok(())
    }
}

/// Queues a copy to each piece. `source` has the bytes from `start` on.
///
/// # Safety
/// The source stays until the copies have finished.
unsafe fn copy_pieces(stream: &RawStream, pieces: &[Piece], start: u64, source: &[u8]) -> Result<(), Error> {
    for Piece { bytes, address } in pieces {
        let part = &source[(bytes.start - start) as usize..(bytes.end - start) as usize];
        // SAFETY: the caller's promise. The pool's memory lives as long as the region, which waits for
        // its copies.
        unsafe { stream.copy_to_gpu(*address, part)? };
    }
    Ok(())
}

impl<D> Stream<D> for CudaStream
where
    D: Device<Region = CudaRegion, Chunk = CudaChunk, Event = CudaEvent>,
    D: for<'a> Device<Bytes<'a> = GpuBytes<'a>>,
{
    fn after(&mut self, event: &CudaEvent) -> Result<(), Error> {
        self.enter()?;
        Ok(self.raw.after(event.raw())?)
    }

    /// Accepts only the whole GPU. Green contexts, which restrict launches to some SMs, are not wired to
    /// streams yet.
    fn restrict(&mut self, on: SmShare) -> Result<(), Error> {
        if on.units() == on.whole() {
            return Ok(());
        }
        Err(Error::Unsupported("launches on a part of the SMs"))
    }

    fn copy(&mut self, region: &CudaRegion, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error> {
        self.check_copy(&bytes)?;
        let problem = "past the end of the host copy";
        let outside = Error::BadExtent { offset: bytes.start, bytes: bytes.end - bytes.start, problem };
        let source = host.as_slice().get(bytes.start as usize..bytes.end as usize).ok_or(outside)?;
        if !host.is_attached() {
            return self.through_ring(region, bytes, |buffer| {
                buffer.copy_from_slice(source);
                Ok(())
            });
        }
        let start = bytes.start;
        let raw = &self.raw;
        region.issue(raw, bytes, Box::new(host.clone()), |pieces| {
            // SAFETY: the region keeps the host's memory until the copies have finished.
            unsafe { copy_pieces(raw, pieces, start, source) }
        })
    }

    fn copy_from_peer(
        &mut self,
        _region: &CudaRegion,
        _peer: &CudaChunk,
        _offset: u64,
        _bytes: Range<u64>,
    ) -> Result<(), Error> {
        Err(Error::PeerLost("copies between CUDA GPUs are not supported yet".to_owned()))
    }

    fn copy_from_file(
        &mut self,
        region: &CudaRegion,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        self.check_copy(&bytes)?;
        let start = bytes.start;
        self.through_ring(region, bytes, |buffer| memfd::read_at(file, buffer, start))
    }

    fn fill(&mut self, region: &CudaRegion, source: GpuBytes<'_>) -> Result<(), Error> {
        self.enter()?;
        self.shared.faults.may_copy()?;
        let GpuBytes { address, bytes, .. } = source;
        let raw = &self.raw;
        region.issue(raw, 0..bytes, Box::new(()), |pieces| {
            for piece in pieces {
                let length = piece.bytes.end - piece.bytes.start;
                // SAFETY: the source is borrowed until the copies are awaited below.
                unsafe { raw.copy_on_gpu(piece.address, address + piece.bytes.start, length)? };
            }
            Ok(())
        })?;
        Ok(raw.synchronize()?)
    }

    fn copy_out(&mut self, source: CopySource<'_, D>, file: BorrowedFd<'_>, at: u64) -> Result<(), Error> {
        let bytes = match &source {
            CopySource::Region(_, bytes) => bytes.clone(),
            CopySource::Bytes(source) => 0..source.bytes,
        };
        self.check_copy(&bytes)?;
        match source {
            CopySource::Region(region, bytes) => {
                let (_pin, pieces) = region.hold(bytes)?;
                let pieces: Vec<_> = pieces
                    .into_iter()
                    .map(|piece| (piece.address, piece.bytes.end - piece.bytes.start))
                    .collect();
                self.write_out(&pieces, file, at)
            }
            CopySource::Bytes(GpuBytes { address, bytes, .. }) => {
                self.write_out(&[(address, bytes)], file, at)
            }
        }
    }

    fn record(&mut self) -> Result<CudaEvent, Error> {
        self.enter()?;
        Ok(CudaEvent::new(self.raw.record()?))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // The buffers of the ring may still be in use. After an error the context is lost.
        drop(self.raw.synchronize());
    }
}
