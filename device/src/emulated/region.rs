//! A reserved address range, the physical memory behind it, and the set of loaded bytes.
//!
//! These rules make it safe for an engine to read the range through plain references:
//! 1. A launch holds a [`RegionPin`] while it runs, and gets the pin only if the bytes that it reads are
//!    loaded. A value that views bytes of the region holds a pin ([`PinnedBytes`]) while it lives.
//! 2. While a pin exists, the region is neither mapped nor unmapped, and no loaded byte is written.
//! 3. Bytes that are not loaded are inaccessible, at the granularity of pages. If a launch reads more
//!    than it declared, the MMU stops the process, so the launch cannot return results computed from
//!    other bytes.
#![allow(unsafe_code, reason = "builds on `map`")]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::api::MissingBytes;
use crate::emulated::event::EmulatedEvent;
use crate::emulated::extent::Chunk;
use crate::error::Error;
use crate::map::{PageAccess, Reservation, page, page_up};
use crate::memfd;
use crate::memory::HostRegion;
use crate::ranges::{RangeSet, check_parts};

/// Number of bytes that an injected fault changes at the start of each loaded range.
const CORRUPTED_BYTES: u64 = 4096;

/// Block of an emulated GPU's memory in bytes. Memory is mapped in whole blocks, so a region has addresses
/// for the rest of its last block.
const BLOCK: u64 = 2 << 20;

/// Reserved addresses of an emulated GPU. Clones refer to the same region.
#[derive(Debug, Clone)]
pub struct EmulatedRegion(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    reservation: Reservation,
    /// Requested size in bytes; the reservation has whole blocks.
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    placed: Vec<MappedChunk>,
    loaded: RangeSet,
    /// Number of live pins: running launches, and values that view the region.
    pins: usize,
    /// Number of copies into the region that were issued and have not finished.
    fills: usize,
    /// The issued copies that finish on another thread.
    issued: Vec<IssuedCopy>,
    /// Identity of the next copy in `issued`.
    next_copy: u64,
}

/// A copy that finishes on another thread.
#[derive(Debug)]
struct IssuedCopy {
    id: u64,
    bytes: Range<u64>,
    event: EmulatedEvent,
}

/// A chunk of physical memory that is mapped into part of a region.
#[derive(Debug, Clone)]
struct MappedChunk {
    range: Range<u64>,
    file: Arc<OwnedFd>,
    file_offset: u64,
}

/// Part of a region, with its file and offset in physical memory.
type Piece = (Range<u64>, Arc<OwnedFd>, u64);

impl EmulatedRegion {
    pub(super) fn new(bytes: u64) -> Result<Self, Error> {
        // A size without a next block is beyond the address space, which the reservation reports.
        let whole = bytes.max(1).checked_next_multiple_of(BLOCK).unwrap_or(bytes);
        let reservation = Reservation::new(whole)?;
        Ok(Self(Arc::new(Inner { reservation, bytes, state: Mutex::default() })))
    }

    /// Returns the size that was requested at the reservation.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Returns the address of the first byte, which stays the same for the life of the region. Bytes may be
    /// read only under a [`RegionPin`].
    #[must_use]
    pub fn address(&self) -> *const u8 {
        self.0.reservation.address()
    }

    pub(super) fn map(&self, chunks: Vec<(u64, Chunk)>) -> Result<(), Error> {
        let placed = self.placed(chunks)?;
        let mut state = self.state();
        if !state.placed.is_empty() || state.pins + state.fills > 0 {
            return Err(Error::Busy);
        }
        self.map_closed(&mut state, placed)
    }

    fn placed(&self, chunks: Vec<(u64, Chunk)>) -> Result<Vec<MappedChunk>, Error> {
        let mut placed: Vec<_> = chunks
            .into_iter()
            .map(|(offset, chunk)| MappedChunk {
                range: offset..offset.saturating_add(chunk.extent.bytes),
                file: chunk.file,
                file_offset: chunk.extent.offset,
            })
            .collect();
        placed.sort_by_key(|place| place.range.start);
        check_parts(placed.iter().map(|place| &place.range), page(), self.0.reservation.bytes())?;
        Ok(placed)
    }

    /// Maps memory without access. The caller holds the lock, and has checked that the region is
    /// unmapped and has no pin.
    fn map_closed(&self, state: &mut State, placed: Vec<MappedChunk>) -> Result<(), Error> {
        for place in &placed {
            let offset = place.range.start;
            let bytes = place.range.end - place.range.start;
            // SAFETY: the region was unmapped and has no pin, so no reference to its bytes is in use.
            let shown = unsafe {
                self.0.reservation.map(offset, &place.file, place.file_offset, bytes, PageAccess::Closed)
            };
            if let Err(error) = shown {
                self.unmap_all(state)?;
                return Err(error);
            }
        }
        state.placed = placed;
        Ok(())
    }

    /// Makes loaded bytes readable. Whole pages are opened, because the edges of a copy share their
    /// pages with the neighbouring bytes.
    fn open(&self, bytes: &Range<u64>) -> Result<(), Error> {
        let start = bytes.start - bytes.start % page();
        self.0.reservation.make_readable(start, page_up(bytes.end) - start)
    }

    pub(super) fn unmap(&self) -> Result<(), Error> {
        let mut state = self.state();
        if state.pins + state.fills > 0 {
            return Err(Error::Busy);
        }
        if state.placed.is_empty() { Ok(()) } else { self.unmap_all(&mut state) }
    }

    /// Unmaps the region. The caller holds the lock, and has checked that there are no pins and no fills.
    fn unmap_all(&self, state: &mut State) -> Result<(), Error> {
        state.loaded.clear();
        state.placed.clear();
        // SAFETY: without pins no reference is in use, and no pin is given for bytes that are not loaded.
        unsafe { self.0.reservation.unmap() }
    }

    pub(super) fn missing(&self, bytes: Range<u64>) -> Option<MissingBytes<EmulatedEvent>> {
        let state = self.state();
        let gap = state.loaded.first_gap(bytes.clone())?;
        let copies = state.issued.iter().filter(|copy| overlap(&copy.bytes, &bytes));
        let copies: Vec<_> = copies.collect();
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

    /// Begins a copy to the byte range `bytes`, which is not loaded until the copy has finished.
    pub(super) fn issue(&self, bytes: Range<u64>) -> Result<IssuedFill, Error> {
        if bytes.end > self.bytes() {
            return Err(past_the_end(&bytes));
        }
        let mut state = self.state();
        let pieces = state.locate(bytes.clone())?;
        if state.pins > 0 && state.loaded.intersects(bytes.clone()) {
            return Err(Error::Busy);
        }
        // Removed before the copy, so that no launch can start to read these bytes while they change.
        state.loaded.remove(bytes.clone());
        state.fills += 1;
        Ok(IssuedFill { region: self.clone(), bytes, pieces, announced: None })
    }

    /// Pins the region, so that a launch may read these bytes until the pin is dropped. All of them
    /// must be loaded.
    ///
    /// # Errors
    /// [`Error::NotResident`].
    pub fn pin(&self, reads: &[Range<u64>]) -> Result<RegionPin, Error> {
        let mut state = self.state();
        for read in reads {
            if let Some(gap) = state.loaded.first_gap(read.clone()) {
                return Err(Error::NotResident(gap));
            }
        }
        state.pins += 1;
        Ok(RegionPin(self.clone()))
    }

    /// Pins these bytes, all of which must be loaded, and returns them for reading.
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::NotResident`].
    pub fn hold(&self, bytes: Range<u64>) -> Result<PinnedBytes, Error> {
        if bytes.start > bytes.end || bytes.end > self.bytes() {
            return Err(past_the_end(&bytes));
        }
        Ok(PinnedBytes { pin: self.pin(std::slice::from_ref(&bytes))?, bytes })
    }

    /// Builds a value that reads the region through plain references. While `build` runs, the host
    /// copy is mapped at the region's addresses.
    ///
    /// # Safety
    /// The result of `build` must not outlive this region. Outside `build`, only launches that hold a
    /// [`RegionPin`] may read the slice.
    ///
    /// # Errors
    /// [`Error::BadExtent`] if the host copy has another size; [`Error::Busy`]; [`Error::Os`].
    pub unsafe fn bind<T>(
        &self,
        host: &HostRegion,
        build: impl FnOnce(&'static [u8]) -> T,
    ) -> Result<T, Error> {
        if host.bytes().get() != self.bytes() {
            let problem = "not the size of the host copy";
            return Err(Error::BadExtent { offset: 0, bytes: self.bytes(), problem });
        }
        // Locked throughout, so that no other thread maps, fills or pins the region in the meantime.
        let mut state = self.state();
        if !state.placed.is_empty() || state.pins + state.fills > 0 {
            return Err(Error::Busy);
        }
        if self.bytes() > 0 {
            // SAFETY: the region was unmapped and has no pin, so no reference to its bytes is in use.
            unsafe { self.0.reservation.map(0, host, 0, page_up(self.bytes()), PageAccess::Readable)? };
        }
        // SAFETY: the range is mapped and readable during `build`, and its memory is sealed against
        // writing. After `build`, the caller's promise holds.
        let built = build(unsafe { self.0.reservation.bytes_of(0..self.bytes()) });
        self.unmap_all(&mut state)?;
        Ok(built)
    }

    /// Changes loaded bytes without the usual checks, as a hardware fault would.
    pub(super) fn corrupt(&self) -> Result<(), Error> {
        let state = self.state();
        if state.loaded.bytes() == 0 {
            return Err(Error::NotMapped(0..self.bytes()));
        }
        for loaded in state.loaded.iter() {
            let end = loaded.end.min(loaded.start + CORRUPTED_BYTES);
            for (part, file, offset) in state.locate(loaded.start..end)? {
                let mut bytes = vec![0; (part.end - part.start) as usize];
                memfd::read_at(&file, &mut bytes, offset)?;
                bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
                memfd::write_at(&file, &bytes, offset)?;
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Ignores a poisoned lock: `bind` may unwind out of a model's loader while it holds the lock,
        // and the state is consistent at that point.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns these bytes of a host copy.
pub(super) fn part<'a>(host: &'a [u8], bytes: &Range<u64>) -> Result<&'a [u8], Error> {
    let ends = usize::try_from(bytes.start).ok().zip(usize::try_from(bytes.end).ok());
    ends.and_then(|(start, end)| host.get(start..end)).ok_or_else(|| past_the_end(bytes))
}

fn past_the_end(bytes: &Range<u64>) -> Error {
    let problem = "past the end of the region or of its host copy";
    Error::BadExtent { offset: bytes.start, bytes: bytes.end.saturating_sub(bytes.start), problem }
}

impl State {
    fn locate(&self, bytes: Range<u64>) -> Result<Vec<Piece>, Error> {
        locate(&self.placed, bytes)
    }
}

/// Returns the pieces of physical memory behind these bytes.
fn locate(placed: &[MappedChunk], bytes: Range<u64>) -> Result<Vec<Piece>, Error> {
    let mut pieces = Vec::new();
    let mut at = bytes.start;
    let first = placed.partition_point(|place| place.range.end <= at);
    for place in &placed[first..] {
        if at >= bytes.end || place.range.start > at {
            break;
        }
        let end = place.range.end.min(bytes.end);
        pieces.push((at..end, Arc::clone(&place.file), place.file_offset + (at - place.range.start)));
        at = end;
    }
    if at < bytes.end { Err(Error::NotMapped(at..bytes.end)) } else { Ok(pieces) }
}

/// Protects bytes of the region from changes while a launch or a value reads them.
#[derive(Debug)]
pub struct RegionPin(EmulatedRegion);

impl Drop for RegionPin {
    fn drop(&mut self) {
        self.0.state().pins -= 1;
    }
}

/// A pinned byte range of a region.
#[derive(Debug)]
pub struct PinnedBytes {
    pin: RegionPin,
    bytes: Range<u64>,
}

impl PinnedBytes {
    /// Returns the bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        let EmulatedRegion(inner) = &self.pin.0;
        // SAFETY: the slice is bound to `self`, which keeps the region alive and holds a pin. The
        // bytes were loaded when the pin was given, so they are mapped and readable. Until the pin is
        // dropped, no thread writes to or unmaps them.
        unsafe { inner.reservation.bytes_of(self.bytes.clone()) }
    }
}

/// A copy into a region that was issued and has not finished. Dropping the value ends the copy.
#[derive(Debug)]
pub(super) struct IssuedFill {
    region: EmulatedRegion,
    bytes: Range<u64>,
    pieces: Vec<Piece>,
    /// Identity of the copy among those that finish on another thread.
    announced: Option<u64>,
}

impl IssuedFill {
    /// Lets [`EmulatedRegion::missing`] name the event at which the copy has finished.
    pub(super) fn announce(&mut self, event: &EmulatedEvent) {
        let mut state = self.region.state();
        let id = state.next_copy;
        state.next_copy += 1;
        state.issued.push(IssuedCopy { id, bytes: self.bytes.clone(), event: event.clone() });
        self.announced = Some(id);
    }

    /// Copies `source`, which is as long as the byte range. The bytes are loaded when the call returns.
    pub(super) fn finish(self, source: &[u8]) -> Result<(), Error> {
        let mut rest = source;
        for (part, file, file_offset) in &self.pieces {
            let (now, later) = rest.split_at((part.end - part.start) as usize);
            memfd::write_at(file, now, *file_offset)?;
            rest = later;
        }
        self.region.open(&self.bytes)?;
        self.region.state().loaded.insert(self.bytes.clone());
        Ok(())
    }
}

impl Drop for IssuedFill {
    fn drop(&mut self) {
        let mut state = self.region.state();
        state.fills -= 1;
        if let Some(id) = self.announced {
            state.issued.retain(|copy| copy.id != id);
        }
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
