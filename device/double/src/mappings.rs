//! The memory that the GPU reaches: physical memory, its mappings, and memory of the host.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUresult;

use crate::rule::{Refusal, abort, system};

/// Unit of handles and ranges.
pub(crate) const GRANULARITY: u64 = 2 << 20;

#[derive(Debug)]
pub(crate) struct Memory {
    total: Option<u64>,
    /// Bytes of new memory that were filled.
    filled: u64,
    pub(crate) handles: BTreeMap<u64, Arc<Physical>>,
    /// Length of each reserved range, by its first address.
    pub(crate) reservations: BTreeMap<u64, u64>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
}

#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) memory: Arc<Physical>,
    pub(crate) open: bool,
}

impl Memory {
    pub(crate) const NEW: Self = Self {
        total: None,
        filled: 0,
        handles: BTreeMap::new(),
        reservations: BTreeMap::new(),
        mappings: BTreeMap::new(),
    };

    /// Returns the mappings that fill a range exactly, or None.
    pub(crate) fn whole(&self, range: &Range<u64>) -> Option<Vec<u64>> {
        let mut end = range.start;
        let mut starts = Vec::new();
        while end < range.end {
            end += self.mappings.get(&end)?.memory.bytes;
            starts.push(end);
        }
        (end == range.end && !range.is_empty())
            .then(|| self.mappings.range(range.clone()).map(|(start, _)| *start).collect())
    }

    /// Returns whether all bytes of a range are mapped and open.
    pub(crate) fn is_open(&self, range: &Range<u64>) -> bool {
        let mut at = range.start;
        while at < range.end {
            let Some((start, mapping)) = self.mappings.range(..=at).next_back() else { return false };
            let end = start + mapping.memory.bytes;
            if !mapping.open || end <= at {
                return false;
            }
            at = end;
        }
        true
    }

    /// Returns whether a reserved range has some of these addresses.
    pub(crate) fn is_reserved(&self, range: &Range<u64>) -> bool {
        let before = self.reservations.range(..range.end).next_back();
        before.is_some_and(|(start, bytes)| start + bytes > range.start)
    }
}

const DEFAULT_TOTAL: u64 = 1 << 30;
/// Bytes of new memory that are filled, all handles together. Memory after that is sparse and zero, so
/// that tests of gigabytes use little.
const FILLED_MAX: u64 = 64 << 20;
/// Contents of new memory.
const FILLING: u8 = 0xA5;

/// Physical memory: stays until its handles and mappings are gone.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    /// Whether another process made the memory, and counts it.
    pub(crate) imported: bool,
}

/// Bytes of all physical memory that this process made.
static USED: AtomicU64 = AtomicU64::new(0);

impl Drop for Physical {
    fn drop(&mut self) {
        if !self.imported {
            USED.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Memory {
    pub(crate) fn total(&mut self) -> u64 {
        *self.total.get_or_insert_with(|| match std::env::var("MILLRACE_DOUBLE_MEMORY") {
            Err(_) => DEFAULT_TOTAL,
            Ok(text) => {
                text.parse().unwrap_or_else(|_| abort("MILLRACE_DOUBLE_MEMORY", "expected a number of bytes"))
            }
        })
    }

    pub(crate) fn used(&self) -> u64 {
        USED.load(Ordering::Relaxed)
    }

    pub(crate) fn make(&mut self, bytes: u64) -> Result<Physical, Refusal> {
        let fits = self.used().checked_add(bytes).is_some_and(|used| used <= self.total());
        if !fits {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("cuda-double", flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&file, bytes).map_err(system("ftruncate"))?;
        if self.filled + bytes <= FILLED_MAX {
            self.filled += bytes;
            let filling = vec![FILLING; GRANULARITY as usize];
            for at in (0..bytes).step_by(GRANULARITY as usize) {
                rustix::io::pwrite(&file, &filling, at).map_err(system("pwrite"))?;
            }
        }
        USED.fetch_add(bytes, Ordering::Relaxed);
        Ok(Physical { file, bytes, imported: false })
    }
}

#[derive(Debug)]
pub(crate) struct Host {
    /// Length of each registered range, by its first address.
    pub(crate) registered: BTreeMap<u64, u64>,
    /// The same for memory of the driver.
    pub(crate) pinned: BTreeMap<u64, u64>,
}

impl Host {
    pub(crate) const NEW: Self = Self { registered: BTreeMap::new(), pinned: BTreeMap::new() };

    /// Returns whether the GPU reaches all bytes of a range.
    pub(crate) fn is_reached(&self, range: &Range<u64>) -> bool {
        [&self.registered, &self.pinned].into_iter().any(|known| {
            let before = known.range(..=range.start).next_back();
            before.is_some_and(|(start, bytes)| range.end <= start + bytes)
        })
    }
}
