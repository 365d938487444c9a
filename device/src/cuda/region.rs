//! Reserved addresses, the memory that is mapped there, and the books of which bytes are loaded.
//!
//! A copy's bytes are loaded once its event has happened. That is noticed only when somebody asks which bytes are missing.
//! Memory is mapped by a thread of its own, in the order of the calls; a launch waits for the mapping.
#![allow(unsafe_code, reason = "unmaps memory, and queues copies into memory")]

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::driver::{AddressRange, RawEvent, RawStream};
use super::event::CudaEvent;
use super::mapper::Mapper;
use super::pool::{BLOCK, CudaChunk, Pool};
use crate::api::{Event as _, MemoryExtent, MissingBytes};
use crate::error::{DriverError, Error};
use crate::ranges::{RangeSet, check_parts};

/// Reserved addresses of a CUDA GPU. Clones refer to the same region.
#[derive(Debug, Clone)]
pub struct CudaRegion(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// First address of the region.
    base: u64,
    /// Requested size in bytes; the range has whole blocks.
    bytes: u64,
    pool: Arc<Pool>,
    mapper: Mapper,
    state: Mutex<State>,
    /// Signalled when the mapping thread has carried out a job.
    mapped: Condvar,
    /// Used by the mapping thread alone.
    range: Mutex<AddressRange>,
}

/// Keeps the source of a copy until the copy has finished.
pub(super) type KeptAlive = Box<dyn Any + Send + Sync>;

#[derive(Debug, Default)]
struct State {
    placed: Vec<Placed>,
    /// Number of jobs that the mapping thread has not carried out.
    unmapped: usize,
    /// Error of the last job of the mapping thread.
    failed: Option<Error>,
    loaded: RangeSet,
    /// Number of launches and values that read the region.
    pins: usize,
    issued: Vec<IssuedCopy>,
    /// Events after work that was queued under pins which are gone.
    readers: Vec<RawEvent>,
}

/// A part of the region, and where its memory is in the pool.
#[derive(Debug, Clone)]
struct Placed {
    range: Range<u64>,
    offset: u64,
}

/// A copy that may not have finished.
#[derive(Debug)]
struct IssuedCopy {
    bytes: Range<u64>,
    event: CudaEvent,
    _source: KeptAlive,
}

/// A part of a copy: bytes of the region, and their address in the arena.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) bytes: Range<u64>,
    pub(super) address: u64,
}

impl CudaRegion {
    pub(super) fn new(pool: &Arc<Pool>, mapper: &Mapper, bytes: u64) -> Result<Self, Error> {
        let whole = bytes.max(1).checked_next_multiple_of(BLOCK.get());
        let problem = "longer than the address space";
        let whole = whole.ok_or(Error::BadExtent { offset: 0, bytes, problem })?;
        let range = AddressRange::reserve(whole, 0)?;
        Ok(Self(Arc::new(Inner {
            base: range.base(),
            bytes,
            pool: Arc::clone(pool),
            mapper: mapper.clone(),
            state: Mutex::default(),
            mapped: Condvar::new(),
            range: Mutex::new(range),
        })))
    }

    /// Returns the size that was requested at the reservation.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Returns the first address, which stays the same for the life of the region.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.base
    }

    pub(super) fn map(&self, chunks: Vec<(u64, CudaChunk)>) -> Result<(), Error> {
        let mut placed: Vec<_> = chunks
            .iter()
            .map(|(at, CudaChunk { extent, .. })| Placed {
                range: *at..at.saturating_add(extent.bytes),
                offset: extent.offset,
            })
            .collect();
        placed.sort_by_key(|place| place.range.start);
        check_parts(
            placed.iter().map(|place| &place.range),
            BLOCK.get(),
            self.0.bytes.next_multiple_of(BLOCK.get()),
        )?;
        let mut state = self.state();
        state.settle();
        if !state.placed.is_empty() || state.is_used() {
            return Err(Error::Busy);
        }
        state.placed = placed.clone();
        self.queue(&mut state, move |pool, range| {
            for place in &placed {
                let bytes = place.range.end - place.range.start;
                pool.map_into(range, place.range.start, MemoryExtent { offset: place.offset, bytes })?;
            }
            let gpu = pool.context().gpu();
            joined(&placed)
                .into_iter()
                .try_for_each(|part| range.open(part.start, part.end - part.start, gpu))
        })
    }

    pub(super) fn unmap(&self) -> Result<(), Error> {
        let mut state = self.state();
        state.settle();
        if state.is_used() {
            return Err(Error::Busy);
        }
        state.loaded.clear();
        if std::mem::take(&mut state.placed).is_empty() {
            return Ok(());
        }
        // The blocks may be used elsewhere at once: another mapping of the same memory harms nobody.
        // SAFETY: no copy is under way, and no pin shows a launch that reads the region.
        self.queue(&mut state, |_, range| unsafe { range.unmap_all() })
    }

    /// Lets the mapping thread do something.
    fn queue(
        &self,
        state: &mut State,
        job: impl FnOnce(&Pool, &mut AddressRange) -> Result<(), DriverError> + Send + 'static,
    ) -> Result<(), Error> {
        state.unmapped += 1;
        let region = self.clone();
        let queued = self.0.mapper.queue(Box::new(move || {
            let inner = &region.0;
            let done = job(&inner.pool, &mut inner.range.lock().unwrap_or_else(PoisonError::into_inner));
            let mut state = region.state();
            state.unmapped -= 1;
            // Unmapping after a failed mapping makes the region usable again.
            state.failed = done.err().map(Error::from);
            inner.mapped.notify_all();
        }));
        if queued.is_err() {
            state.unmapped -= 1;
        }
        queued
    }

    pub(super) fn missing(&self, bytes: Range<u64>) -> Option<MissingBytes<CudaEvent>> {
        let mut state = self.state();
        state.settle();
        let gap = state.loaded.first_gap(bytes.clone())?;
        let copies: Vec<_> = state.issued.iter().filter(|copy| overlap(&copy.bytes, &bytes)).collect();
        if copies.is_empty() {
            return Some(MissingBytes::NotIssued(gap));
        }
        let mut expected = state.loaded.clone();
        copies.iter().for_each(|copy| expected.insert(copy.bytes.clone()));
        let events = || copies.iter().map(|copy| copy.event.clone()).collect();
        Some(
            expected.first_gap(bytes).map_or_else(|| MissingBytes::Issued(events()), MissingBytes::NotIssued),
        )
    }

    /// Queues a copy into these bytes. `queue` gets the stream and the parts of the copy, and queues
    /// a copy to each; the source is kept until they have finished.
    pub(super) fn issue(
        &self,
        stream: &RawStream,
        bytes: Range<u64>,
        source: KeptAlive,
        queue: impl FnOnce(&[Piece]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if bytes.start > bytes.end || bytes.end > self.bytes() {
            return Err(past_the_end(&bytes));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let mut state = self.state();
        state.settle();
        let pieces = state.locate(&self.0.pool, bytes.clone())?;
        if (state.pins > 0 || !state.readers.is_empty()) && state.loaded.intersects(bytes.clone()) {
            return Err(Error::Busy);
        }
        // A copy over bytes of an earlier copy comes after it.
        for copy in state.issued.iter().filter(|copy| overlap(&copy.bytes, &bytes)) {
            stream.after(copy.event.raw())?;
        }
        state.loaded.remove(bytes.clone());
        if let Err(error) = queue(&pieces) {
            // Some of the parts may be queued; the source must not go before them.
            stream.synchronize()?;
            return Err(error);
        }
        let event = CudaEvent::new(stream.record()?);
        state.issued.push(IssuedCopy { bytes, event, _source: source });
        Ok(())
    }

    /// Pins the region, so that work of the stream may read these bytes until the pin is dropped. Lets
    /// the stream wait for the copies of the bytes, and waits until the region is mapped.
    ///
    /// # Errors
    /// [`Error::NotResident`] if the copy of some byte was not issued; the error of the mapping.
    pub(super) fn pin(&self, stream: &Arc<RawStream>, reads: &[Range<u64>]) -> Result<CudaRegionPin, Error> {
        let mut state = self.state();
        while state.unmapped > 0 {
            state = self.0.mapped.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.settle();
        let mut expected = state.loaded.clone();
        state.issued.iter().for_each(|copy| expected.insert(copy.bytes.clone()));
        for read in reads {
            if let Some(gap) = expected.first_gap(read.clone()) {
                return Err(Error::NotResident(gap));
            }
        }
        for copy in &state.issued {
            if reads.iter().any(|read| overlap(read, &copy.bytes)) {
                stream.after(copy.event.raw())?;
            }
        }
        state.pins += 1;
        Ok(CudaRegionPin { region: self.clone(), stream: Some(Arc::clone(stream)) })
    }

    /// Pins bytes that are loaded, for work that the caller awaits, and returns where they are.
    pub(super) fn hold(&self, bytes: Range<u64>) -> Result<(CudaRegionPin, Vec<Piece>), Error> {
        if bytes.start > bytes.end || bytes.end > self.bytes() {
            return Err(past_the_end(&bytes));
        }
        let mut state = self.state();
        state.settle();
        if let Some(gap) = state.loaded.first_gap(bytes.clone()) {
            return Err(Error::NotResident(gap));
        }
        let pieces = state.locate(&self.0.pool, bytes)?;
        state.pins += 1;
        Ok((CudaRegionPin { region: self.clone(), stream: None }, pieces))
    }

    /// Returns where the first loaded bytes are.
    pub(super) fn first_loaded(&self) -> Option<Piece> {
        let mut state = self.state();
        state.settle();
        let first = state.loaded.iter().next()?;
        state.locate(&self.0.pool, first).ok()?.into_iter().next()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Ignores a poisoned lock: no foreign code runs under the lock, so the state is consistent.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_used(&self) -> bool {
        self.pins > 0 || !self.issued.is_empty() || !self.readers.is_empty()
    }

    /// Counts the bytes of finished copies as loaded. The bytes of a failed copy are missing.
    fn settle(&mut self) {
        let loaded = &mut self.loaded;
        self.issued.retain(|copy| match copy.event.raw().is_done() {
            Ok(false) => true,
            Ok(true) => {
                loaded.insert(copy.bytes.clone());
                false
            }
            Err(_) => false,
        });
        self.readers.retain(|event| matches!(event.is_done(), Ok(false)));
    }

    /// Returns the parts of the pool behind these bytes.
    fn locate(&self, pool: &Pool, bytes: Range<u64>) -> Result<Vec<Piece>, Error> {
        let mut pieces = Vec::new();
        let mut at = bytes.start;
        let first = self.placed.partition_point(|place| place.range.end <= at);
        for place in &self.placed[first..] {
            if at >= bytes.end || place.range.start > at {
                break;
            }
            let end = place.range.end.min(bytes.end);
            let address = pool.address(place.offset + (at - place.range.start));
            pieces.push(Piece { bytes: at..end, address });
            at = end;
        }
        if at < bytes.end { Err(Error::NotMapped(at..bytes.end)) } else { Ok(pieces) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for copy in &state.issued {
            // After an error the context is lost, and its work with it.
            drop(copy.event.wait());
        }
        for event in &state.readers {
            drop(event.wait());
        }
    }
}

/// Keeps the memory of a region mapped while a launch or a value reads it.
#[derive(Debug)]
pub struct CudaRegionPin {
    region: CudaRegion,
    /// The stream of the work that reads the region, if the work may still run after the pin.
    stream: Option<Arc<RawStream>>,
}

impl Drop for CudaRegionPin {
    fn drop(&mut self) {
        let last = self.stream.as_ref().map(|stream| stream.record());
        let mut state = self.region.state();
        state.pins -= 1;
        // Without an event the context is lost, and its work with it.
        state.readers.extend(last.and_then(Result::ok));
    }
}

/// Joins the ranges that touch, so that a call opens all of them.
fn joined(sorted: &[Placed]) -> Vec<Range<u64>> {
    let mut parts = RangeSet::default();
    sorted.iter().for_each(|place| parts.insert(place.range.clone()));
    parts.iter().collect()
}

fn past_the_end(bytes: &Range<u64>) -> Error {
    let problem = "past the end of the region";
    Error::BadExtent { offset: bytes.start, bytes: bytes.end.saturating_sub(bytes.start), problem }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
