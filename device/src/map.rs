//! Address space: ranges that are reserved once and show different memory over time, and plain
//! read-only mappings.
#![allow(unsafe_code, reason = "one of the crate's unsafe parts")]

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::error::Error;

/// The unit of every offset and length here: what the MMU maps.
pub(crate) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Rounds up to whole pages.
pub(crate) fn page_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(page())
}

/// Which pages a mapping shows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum View {
    /// The file's pages, but no access: they can be opened with [`Reservation::open`].
    Closed,
    /// The file's pages, readable.
    Readable,
}

/// A range of addresses that belongs to its owner until it is dropped. Where nothing is shown, any
/// access faults.
#[derive(Debug)]
pub(crate) struct Reservation {
    base: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the reservation is an address range of the process, not of a thread; what changes its
// mappings are system calls, which the kernel serialises.
unsafe impl Send for Reservation {}
// SAFETY: as above; the methods that change what readers see are unsafe and say what they need.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves at least `bytes` (at least a page) of addresses. Costs no memory.
    pub(crate) fn new(bytes: u64) -> Result<Self, Error> {
        let bytes = usize::try_from(page_up(bytes.max(1))).map_err(|_| too_long(bytes))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh anonymous mapping wherever the kernel finds room replaces nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
        let base = base.map_err(Error::os("reserve addresses"))?;
        Ok(Self { base: NonNull::new(base).expect("mmap never returns null without MAP_FIXED"), bytes })
    }

    /// Its length, in whole pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Shows `bytes` of `file` from `file_offset` at `offset`; all three are whole pages.
    ///
    /// # Safety
    /// Nothing may read the range's bytes `offset..offset + bytes` while this runs, and nothing may
    /// expect their former contents afterwards.
    pub(crate) unsafe fn show(
        &self,
        offset: u64,
        file: impl AsFd,
        file_offset: u64,
        bytes: u64,
        view: View,
    ) -> Result<(), Error> {
        let (at, length) = self.part(offset, bytes);
        let (protection, sharing) = match view {
            View::Closed => (ProtFlags::empty(), MapFlags::SHARED),
            // Private and never written: it shows the file's pages, and a file sealed against
            // writing may be mapped so on every kernel.
            View::Readable => (ProtFlags::READ, MapFlags::PRIVATE),
        };
        // SAFETY: the part lies within this reservation, which nothing else maps into, and the
        // caller vouches that nobody reads it.
        let shown =
            unsafe { rustix::mm::mmap(at, length, protection, sharing | MapFlags::FIXED, file, file_offset) };
        shown.map(drop).map_err(Error::os("map memory"))
    }

    /// Lets what is shown at `offset` be read, and fills the page tables for it, so that the first
    /// launch to read it takes no faults.
    pub(crate) fn open(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        let (at, length) = self.part(offset, bytes);
        // SAFETY: giving access takes nothing from anyone; the part is this reservation's.
        unsafe { rustix::mm::mprotect(at, length, MprotectFlags::READ) }.map_err(Error::os("open memory"))?;
        // SAFETY: the advice neither changes nor frees contents.
        match unsafe { rustix::mm::madvise(at, length, Advice::LinuxPopulateRead) } {
            // Only advice: a kernel before 5.14 does not know it, and launches then take the faults.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Shows nothing any more.
    ///
    /// # Safety
    /// Nothing may read the range while this runs or afterwards.
    pub(crate) unsafe fn hide(&self) -> Result<(), Error> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is this reservation's own, and the caller vouches for its readers.
        let hidden =
            unsafe { rustix::mm::mmap_anonymous(self.base.as_ptr(), self.bytes, ProtFlags::empty(), flags) };
        hidden.map(drop).map_err(Error::os("unmap memory"))
    }

    /// These bytes of the range.
    ///
    /// # Safety
    /// The slice must not be used once the reservation is dropped. Bytes of it may be read only
    /// while they are shown and open, and while nothing writes to the memory shown.
    pub(crate) unsafe fn bytes_of(&self, bytes: Range<u64>) -> &'static [u8] {
        let Range { start, end } = bytes;
        assert!(start <= end && end <= self.bytes(), "a view is within its reservation");
        let first = self.base.as_ptr().wrapping_byte_add(start as usize);
        // SAFETY: the addresses are this reservation's, so they belong to no other object; when and
        // for how long they may be read is the caller's part.
        unsafe { std::slice::from_raw_parts(first.cast(), (end - start) as usize) }
    }

    fn part(&self, offset: u64, bytes: u64) -> (*mut c_void, usize) {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes()), "a part is within its reservation");
        assert!(offset.is_multiple_of(page()), "a part starts at a page");
        // In bounds, so the casts lose nothing.
        (self.base.as_ptr().wrapping_byte_add(offset as usize), bytes as usize)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: whoever took a view vouched not to use it any more; the range is ours alone.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a reservation: {unmapped:?}");
    }
}

/// A file's first bytes, mapped for reading for as long as this lives.
#[derive(Debug)]
pub(crate) struct ReadMapping {
    reservation: Reservation,
    bytes: u64,
}

impl ReadMapping {
    /// Maps a file that is sealed against shrinking and writing: the contract of `as_slice` rests
    /// on it, so it is checked here.
    pub(crate) fn of_sealed(file: impl AsFd, bytes: u64) -> Result<Self, Error> {
        crate::memfd::check_sealed(&file, bytes, rustix::fs::SealFlags::WRITE)?;
        let reservation = Reservation::new(bytes)?;
        if bytes > 0 {
            // SAFETY: the reservation is new: no one has a view of it.
            unsafe { reservation.show(0, file, 0, page_up(bytes), View::Readable)? };
        }
        Ok(Self { reservation, bytes })
    }

    /// The bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the slice is bound to `self`, so it ends before the reservation does; it is shown
        // and open since construction, and the file's seals forbid that it is cut or written to.
        unsafe { self.reservation.bytes_of(0..self.bytes) }
    }

    /// Asks that the pages stay in memory, as a DMA engine needs them.
    pub(crate) fn lock(&self) -> Result<(), rustix::io::Errno> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: locking changes no contents; dropping the mapping unlocks.
        unsafe { rustix::mm::mlock(self.reservation.base.as_ptr(), self.reservation.bytes) }
    }
}

fn too_long(bytes: u64) -> Error {
    Error::BadExtent { offset: 0, bytes, problem: "longer than the address space" }
}

#[cfg(test)]
mod tests {
    use rustix::fs::SealFlags;

    use super::*;
    use crate::memfd;

    #[test]
    fn a_sealed_file_is_seen_whole_and_an_unsealed_one_is_refused() {
        let file = memfd::create("test", 5).unwrap();
        memfd::write_at(&file, b"hello", 0).unwrap();
        assert!(matches!(ReadMapping::of_sealed(&file, 5), Err(Error::Unsealed { written: true, .. })));
        memfd::seal(&file, SealFlags::WRITE).unwrap();
        assert!(matches!(ReadMapping::of_sealed(&file, 4), Err(Error::Unsealed { .. })));
        let mapping = ReadMapping::of_sealed(&file, 5).unwrap();
        drop(file);
        assert_eq!(mapping.as_slice(), b"hello");
    }

    #[test]
    fn an_empty_file_maps_to_an_empty_slice() {
        let file = memfd::create("test", 0).unwrap();
        memfd::seal(&file, SealFlags::WRITE).unwrap();
        let mapping = ReadMapping::of_sealed(&file, 0).unwrap();
        assert_eq!((mapping.as_slice(), mapping.lock()), (&[][..], Ok(())));
    }

    #[test]
    fn a_reservation_shows_what_it_is_told_and_then_other_memory() {
        let (first, second) = (memfd::create("a", page()).unwrap(), memfd::create("b", page()).unwrap());
        memfd::write_at(&first, &[1; 8], 0).unwrap();
        memfd::write_at(&second, &[2; 8], 0).unwrap();
        let reservation = Reservation::new(page()).unwrap();
        for (file, expected) in [(&first, [1; 8]), (&second, [2; 8])] {
            // SAFETY: the slice of each round ends before the next one's `show`, and is read while
            // its page is shown and open.
            let seen = unsafe {
                reservation.show(0, file, 0, page(), View::Closed).unwrap();
                reservation.open(0, page()).unwrap();
                reservation.bytes_of(0..8).to_vec()
            };
            assert_eq!(seen, expected);
        }
    }
}
