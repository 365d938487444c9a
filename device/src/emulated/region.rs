//! A reserved range of addresses, the physical memory under it, and which of its bytes are loaded.
//!
//! Rules that make it safe to let rten read the range through plain references:
//! 1. A launch holds a [`Pin`] while it runs, and gets one only if what it reads is loaded; a value
//!    that views bytes of the region holds one ([`Held`]) while it lives.
//! 2. While there is a pin, the region is neither mapped nor unmapped, and no loaded byte is written.
//! 3. What is not loaded has no access, to the page: a launch that reads more than it declared is
//!    stopped by the MMU, and with it the process, rather than answering from other bytes.
#![allow(unsafe_code, reason = "builds on `map`")]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::emulated::Chunk;
use crate::error::Error;
use crate::map::{Reservation, View, page, page_up};
use crate::memfd;
use crate::memory::HostRegion;
use crate::ranges::RangeSet;

/// How many bytes an injected fault changes, of each loaded run.
const CORRUPTED_BYTES: u64 = 4096;

/// Reserved addresses of an emulated GPU. Clones are the same region.
#[derive(Debug, Clone)]
pub struct Region(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    reservation: Reservation,
    /// What the user asked for; the reservation is whole pages.
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    placed: Vec<Placed>,
    loaded: RangeSet,
    /// Launches that run.
    pins: usize,
    /// Copies that run.
    fills: usize,
}

/// Physical memory under part of a region.
#[derive(Debug, Clone)]
struct Placed {
    range: Range<u64>,
    file: Arc<OwnedFd>,
    file_offset: u64,
}

/// Part of a region, and where it is in physical memory.
type Piece = (Range<u64>, Arc<OwnedFd>, u64);

impl Region {
    pub(super) fn new(bytes: u64) -> Result<Self, Error> {
        let reservation = Reservation::new(bytes)?;
        Ok(Self(Arc::new(Inner { reservation, bytes, state: Mutex::default() })))
    }

    /// The bytes asked for when it was reserved.
    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes
    }

    pub(super) fn map(&self, chunks: Vec<(u64, Chunk)>) -> Result<(), Error> {
        let placed = self.placed(chunks)?;
        let mut state = self.state();
        if !state.placed.is_empty() || state.pins + state.fills > 0 {
            return Err(Error::Busy);
        }
        self.show(&mut state, placed)
    }

    fn placed(&self, chunks: Vec<(u64, Chunk)>) -> Result<Vec<Placed>, Error> {
        let mut placed: Vec<_> = chunks
            .into_iter()
            .map(|(offset, chunk)| Placed {
                range: offset..offset.saturating_add(chunk.extent.bytes),
                file: chunk.file,
                file_offset: chunk.extent.offset,
            })
            .collect();
        placed.sort_by_key(|place| place.range.start);
        self.check(&placed)?;
        Ok(placed)
    }

    /// Shows memory, closed. Callers hold the lock; the region shows nothing and nobody has a pin.
    fn show(&self, state: &mut State, placed: Vec<Placed>) -> Result<(), Error> {
        for place in &placed {
            let (offset, bytes) = (place.range.start, place.range.end - place.range.start);
            // SAFETY: the region showed nothing and nobody has a pin, so no one reads it.
            let shown = unsafe {
                self.0.reservation.show(offset, &place.file, place.file_offset, bytes, View::Closed)
            };
            if let Err(error) = shown {
                self.hide(state)?;
                return Err(error);
            }
        }
        state.placed = placed;
        Ok(())
    }

    /// Lets loaded bytes be read: whole pages, as the edges of a copy share theirs with its neighbours.
    fn open(&self, bytes: &Range<u64>) -> Result<(), Error> {
        let start = bytes.start - bytes.start % page();
        self.0.reservation.open(start, page_up(bytes.end) - start)
    }

    fn check(&self, sorted: &[Placed]) -> Result<(), Error> {
        let mut end = 0;
        for Placed { range, .. } in sorted {
            let problem = if !range.start.is_multiple_of(page()) {
                "does not start at a page"
            } else if range.end > self.0.reservation.bytes() {
                "past the end of the region"
            } else if range.start < end {
                "overlaps another"
            } else {
                end = range.end;
                continue;
            };
            return Err(Error::BadExtent { offset: range.start, bytes: range.end - range.start, problem });
        }
        Ok(())
    }

    pub(super) fn unmap(&self) -> Result<(), Error> {
        let mut state = self.state();
        if state.pins + state.fills > 0 {
            return Err(Error::Busy);
        }
        if state.placed.is_empty() { Ok(()) } else { self.hide(&mut state) }
    }

    /// Shows nothing any more. Callers hold the lock and saw neither pins nor fills.
    fn hide(&self, state: &mut State) -> Result<(), Error> {
        state.loaded.clear();
        state.placed.clear();
        // SAFETY: without pins nobody reads the region, and none is given for what is not loaded.
        unsafe { self.0.reservation.hide() }
    }

    pub(super) fn missing(&self, bytes: Range<u64>) -> Option<Range<u64>> {
        self.state().loaded.first_gap(bytes)
    }

    /// Copies `source` to these bytes, which are as many. They are loaded when this returns.
    pub(super) fn fill_from(&self, source: &[u8], bytes: Range<u64>) -> Result<(), Error> {
        if bytes.end > self.bytes() {
            return Err(past_the_end(&bytes));
        }
        let (fill, pieces) = self.begin_fill(bytes.clone())?;
        let mut rest = source;
        for (part, file, file_offset) in pieces {
            let (now, later) = rest.split_at((part.end - part.start) as usize);
            memfd::write_at(&file, now, file_offset)?;
            rest = later;
        }
        self.open(&bytes)?;
        self.state().loaded.insert(bytes);
        drop(fill);
        Ok(())
    }

    fn begin_fill(&self, bytes: Range<u64>) -> Result<(Fill<'_>, Vec<Piece>), Error> {
        let mut state = self.state();
        let pieces = state.locate(bytes.clone())?;
        if state.pins > 0 && state.loaded.intersects(bytes.clone()) {
            return Err(Error::Busy);
        }
        // Nothing may begin to read them while they change.
        state.loaded.remove(bytes);
        state.fills += 1;
        Ok((Fill(self), pieces))
    }

    /// Lets a launch read these bytes, all of which must be loaded, until the pin is dropped.
    pub(super) fn pin(&self, reads: &[Range<u64>]) -> Result<Pin, Error> {
        let mut state = self.state();
        for read in reads {
            if let Some(gap) = state.loaded.first_gap(read.clone()) {
                return Err(Error::NotResident(gap));
            }
        }
        state.pins += 1;
        Ok(Pin(self.clone()))
    }

    /// These bytes, all of which must be loaded, to read for as long as they are held.
    pub(super) fn hold(&self, bytes: Range<u64>) -> Result<Held, Error> {
        if bytes.start > bytes.end || bytes.end > self.bytes() {
            return Err(past_the_end(&bytes));
        }
        Ok(Held { pin: self.pin(std::slice::from_ref(&bytes))?, bytes })
    }

    /// Builds something that reads the region by plain references. While `build` runs, the host
    /// copy is seen at the region's addresses.
    ///
    /// # Safety
    /// What `build` returns must not outlive this region, and outside `build` the slice may be
    /// read only by launches that hold a [`Pin`].
    pub(super) unsafe fn bind<T>(
        &self,
        host: &HostRegion,
        build: impl FnOnce(&'static [u8]) -> T,
    ) -> Result<T, Error> {
        if host.bytes().get() != self.bytes() {
            let problem = "not the size of the host copy";
            return Err(Error::BadExtent { offset: 0, bytes: self.bytes(), problem });
        }
        // Held throughout: no one maps, fills or pins meanwhile.
        let mut state = self.state();
        if !state.placed.is_empty() || state.pins + state.fills > 0 {
            return Err(Error::Busy);
        }
        if self.bytes() > 0 {
            // SAFETY: nothing was shown and nobody has a pin, so no one reads it.
            unsafe { self.0.reservation.show(0, host, 0, page_up(self.bytes()), View::Readable)? };
        }
        // SAFETY: shown and open for `build`, from memory sealed against writing; afterwards the
        // caller's promise holds.
        let built = build(unsafe { self.0.reservation.bytes_of(0..self.bytes()) });
        self.hide(&mut state)?;
        Ok(built)
    }

    /// Changes loaded bytes, as a fault would: behind everyone's back.
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
        // `bind` may unwind out of a model's loader with the lock held; the state is whole then.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// These bytes of a host copy.
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

/// Where in physical memory these bytes are.
fn locate(placed: &[Placed], bytes: Range<u64>) -> Result<Vec<Piece>, Error> {
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

/// A launch that runs, or another that reads.
#[derive(Debug)]
pub(super) struct Pin(Region);

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.state().pins -= 1;
    }
}

/// Bytes of a region that can be read.
#[derive(Debug)]
pub(super) struct Held {
    pin: Pin,
    bytes: Range<u64>,
}

impl Held {
    pub(super) fn as_slice(&self) -> &[u8] {
        let Region(inner) = &self.pin.0;
        // SAFETY: the slice is bound to `self`, which keeps the region and has a pin. They were loaded
        // when that was given, so they are shown and open, and until it is dropped nobody writes to
        // them or unmaps them.
        unsafe { inner.reservation.bytes_of(self.bytes.clone()) }
    }
}

/// A copy that runs.
struct Fill<'a>(&'a Region);

impl Drop for Fill<'_> {
    fn drop(&mut self) {
        self.0.state().fills -= 1;
    }
}
