//! Address space: ranges that are reserved once and map different memory over time, plain read-only
//! mappings, and a page of atomics that processes share.
#![allow(unsafe_code, reason = "one of the crate's unsafe parts")]

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::error::Error;

/// Returns the page size, which is the unit of the MMU and of every offset and length in this module.
pub(crate) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Rounds up to whole pages.
pub(crate) fn page_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(page())
}

/// Access to the pages of a mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PageAccess {
    /// The file's pages are mapped without access, until [`Reservation::make_readable`] makes them readable.
    Closed,
    /// The file's pages are mapped and readable.
    Readable,
    /// The file's pages are mapped, readable and writable.
    Writable,
}

/// A range of addresses that is reserved until the value is dropped. Access to an unmapped part faults.
#[derive(Debug)]
pub(crate) struct Reservation {
    base: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the reservation is an address range of the process, not of a thread. Only system calls
// change its mappings, and the kernel serialises these calls.
unsafe impl Send for Reservation {}
// SAFETY: as above. The methods that change the bytes that readers see are unsafe and state their conditions.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves at least `bytes` (at least a page) of addresses. Uses no memory.
    pub(crate) fn new(bytes: u64) -> Result<Self, Error> {
        let bytes = usize::try_from(page_up(bytes.max(1))).map_err(|_| too_long(bytes))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice replaces no other mapping.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
        let base = base.map_err(Error::os("reserve addresses"))?;
        Ok(Self { base: NonNull::new(base).expect("mmap never returns null without MAP_FIXED"), bytes })
    }

    /// Returns the address of the first byte.
    pub(crate) fn address(&self) -> *const u8 {
        self.base.as_ptr().cast_const().cast()
    }

    /// Returns the length, which is a multiple of the page size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Maps `bytes` of `file` from `file_offset` at `offset`. All three must be multiples of the page size.
    ///
    /// # Safety
    /// No code may read the bytes `offset..offset + bytes` of the range during the call, or rely on
    /// their former contents afterwards.
    pub(crate) unsafe fn map(
        &self,
        offset: u64,
        file: impl AsFd,
        file_offset: u64,
        bytes: u64,
        view: PageAccess,
    ) -> Result<(), Error> {
        let (at, length) = self.part(offset, bytes);
        let map = |protection, sharing: MapFlags| {
            let flags = sharing | MapFlags::FIXED;
            // SAFETY: the part lies within this reservation, where no other code maps memory. The
            // caller guarantees that no code reads the part.
            unsafe { rustix::mm::mmap(at, length, protection, flags, file.as_fd(), file_offset) }
        };
        let shown = match view {
            PageAccess::Closed => map(ProtFlags::empty(), MapFlags::SHARED),
            PageAccess::Writable => map(ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED),
            // A driver that pins a private mapping first makes a private copy of all its pages. Linux
            // before 6.7 refuses a shared mapping of a file that is sealed against writing. There a
            // private mapping, which is never written, shows the file's pages.
            PageAccess::Readable => map(ProtFlags::READ, MapFlags::SHARED).or_else(|refused| match refused {
                Errno::PERM => map(ProtFlags::READ, MapFlags::PRIVATE),
                refused => Err(refused),
            }),
        };
        shown.map(drop).map_err(Error::os("map memory"))
    }

    /// Makes the mapped bytes at `offset` readable, and fills the page tables, so that the first
    /// launch that reads the bytes causes no page faults.
    pub(crate) fn make_readable(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        let (at, length) = self.part(offset, bytes);
        // SAFETY: adding read access cannot invalidate other code's references; the part belongs to
        // this reservation.
        unsafe { rustix::mm::mprotect(at, length, MprotectFlags::READ) }.map_err(Error::os("open memory"))?;
        // SAFETY: this advice neither changes nor frees contents.
        match unsafe { rustix::mm::madvise(at, length, Advice::LinuxPopulateRead) } {
            // Failure is harmless: kernels before 5.14 do not support the advice, and launches then
            // cause the page faults.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Unmaps the whole range.
    ///
    /// # Safety
    /// No code may read the range during the call or afterwards.
    pub(crate) unsafe fn unmap(&self) -> Result<(), Error> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range belongs to this reservation, and the caller guarantees that no code reads it.
        let hidden =
            unsafe { rustix::mm::mmap_anonymous(self.base.as_ptr(), self.bytes, ProtFlags::empty(), flags) };
        hidden.map(drop).map_err(Error::os("unmap memory"))
    }

    /// Returns these bytes of the range.
    ///
    /// # Safety
    /// The slice must not be used after the reservation is dropped. Its bytes may be read only while
    /// they are mapped and readable, and while no code writes to the mapped memory.
    pub(crate) unsafe fn bytes_of(&self, bytes: Range<u64>) -> &'static [u8] {
        let Range { start, end } = bytes;
        assert!(start <= end && end <= self.bytes(), "a view is within its reservation");
        let first = self.base.as_ptr().wrapping_byte_add(start as usize);
        // SAFETY: the addresses belong to this reservation, and so to no other object. The caller
        // guarantees when and for how long the bytes may be read.
        unsafe { std::slice::from_raw_parts(first.cast(), (end - start) as usize) }
    }

    fn part(&self, offset: u64, bytes: u64) -> (*mut c_void, usize) {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes()), "a part is within its reservation");
        assert!(offset.is_multiple_of(page()), "a part starts at a page");
        // The asserts above make both casts lossless.
        (self.base.as_ptr().wrapping_byte_add(offset as usize), bytes as usize)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the callers of `bytes_of` guarantee that no slice is used from now on; the range
        // belongs to this value alone.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a reservation: {unmapped:?}");
    }
}

/// A read-only mapping of the first bytes of a file. Dropping the value unmaps the file.
#[derive(Debug)]
pub(crate) struct ReadMapping {
    reservation: Reservation,
    bytes: u64,
}

impl ReadMapping {
    /// Maps a file, and checks that the file is sealed against shrinking and writing. The safety of
    /// `as_slice` depends on this check.
    pub(crate) fn of_sealed(file: impl AsFd, bytes: u64) -> Result<Self, Error> {
        crate::memfd::check_sealed(&file, bytes, rustix::fs::SealFlags::WRITE)?;
        let reservation = Reservation::new(bytes)?;
        if bytes > 0 {
            // SAFETY: the reservation is new, so no reference to its bytes exists.
            unsafe { reservation.map(0, file, 0, page_up(bytes), PageAccess::Readable)? };
        }
        Ok(Self { reservation, bytes })
    }

    /// Returns the mapped bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the slice is bound to `self`, so it ends before the reservation does. The bytes are
        // mapped and readable since construction, and the file's seals prevent truncation and writes.
        unsafe { self.reservation.bytes_of(0..self.bytes) }
    }

    /// Locks the pages in memory, as a DMA engine requires.
    pub(crate) fn lock(&self) -> Result<(), rustix::io::Errno> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: locking changes no contents; dropping the mapping unlocks the pages.
        unsafe { rustix::mm::mlock(self.reservation.base.as_ptr(), self.reservation.bytes) }
    }
}

/// Number of words of a [`SharedWords`].
pub(crate) const WORDS: usize = 512;
/// Size of the file of a [`SharedWords`] in bytes.
pub(crate) const WORDS_BYTES: u64 = WORDS as u64 * 8;

/// A file of 4 KiB that is mapped as atomics, which other processes may change at any time. Dropping
/// the value unmaps the file.
#[derive(Debug)]
pub(crate) struct SharedWords(Reservation);

impl SharedWords {
    /// Maps a file, and checks the file's size and that the size cannot shrink. The safety of
    /// `as_atomics` depends on this check.
    pub(crate) fn of_sealed(file: impl AsFd) -> Result<Self, Error> {
        crate::memfd::check_sealed(&file, WORDS_BYTES, rustix::fs::SealFlags::empty())?;
        let reservation = Reservation::new(WORDS_BYTES)?;
        // SAFETY: the reservation is new, so no reference to its bytes exists.
        unsafe { reservation.map(0, file, 0, page_up(WORDS_BYTES), PageAccess::Writable)? };
        Ok(Self(reservation))
    }

    /// Returns the words of the file.
    pub(crate) fn as_atomics(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the reference is bound to `self`, so it ends before the reservation does. The words are
        // mapped and writable since construction, aligned to a page, and the file's seals prevent
        // truncation. Every bit pattern is a valid word, and this process accesses the words only as
        // atomics.
        unsafe { &*self.0.address().cast() }
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
    fn a_sealed_file_is_mapped_and_an_unsealed_one_is_refused() {
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
    fn a_reservation_can_be_mapped_again_to_other_memory() {
        let first = memfd::create("a", page()).unwrap();
        let second = memfd::create("b", page()).unwrap();
        memfd::write_at(&first, &[1; 8], 0).unwrap();
        memfd::write_at(&second, &[2; 8], 0).unwrap();
        let reservation = Reservation::new(page()).unwrap();
        for (file, expected) in [(&first, [1; 8]), (&second, [2; 8])] {
            // SAFETY: the slice of each round ends before the `map` of the next round, and is read
            // while its page is mapped and readable.
            let seen = unsafe {
                reservation.map(0, file, 0, page(), PageAccess::Closed).unwrap();
                reservation.make_readable(0, page()).unwrap();
                reservation.bytes_of(0..8).to_vec()
            };
            assert_eq!(seen, expected);
        }
    }
}
