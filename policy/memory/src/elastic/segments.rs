//! Memory with the sizes and rules of `PyTorch`'s caching allocator at its defaults
//! (`c10/cuda/CUDACachingAllocator.cpp`, no `PYTORCH_CUDA_ALLOC_CONF`):
//!
//! - a request is rounded up to 512 B. A request up to 1 MiB is *small*, and small and large
//!   requests never share a segment;
//! - the smallest free piece that is long enough serves the request; ties go to the lowest address;
//! - if no piece is long enough, a segment is allocated: 2 MiB for small requests, 20 MiB for
//!   requests below 10 MiB, else the size rounded up to 2 MiB. Segments never join: 100 MiB free in
//!   each of two do not serve 120;
//! - the rest of a piece is split off from 512 B (small) or above 1 MiB (large);
//! - a returned piece joins its free neighbours in its segment and stays allocated;
//! - when the device is out of memory (here: at the limit), all wholly free segments are released,
//!   and the allocation is retried once.
//!
//! Segments are whole blocks of the GPU, so a GPU with larger blocks has larger segments.
//!
//! Not modelled: streams, because a store's copies end before their memory is given back; and
//! `max_split_size`, expandable segments and the garbage collector, all of which are off by
//! default.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::Bytes;

use super::config::CAP_MAX;
use super::protocol::StoreExtent;
use crate::BlockSize;

/// Granularity to which sizes are rounded up, in bytes.
const QUANTUM: u64 = 512;
/// Largest small request in bytes, and the rest above which a large piece is split.
const SMALL_MAX: u64 = 1 << 20;
/// Size of a segment for small requests, in bytes.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Smallest request with a segment of its own, in bytes.
const OWN_SEGMENT_MIN: u64 = 10 << 20;
/// Size of a segment for large requests below [`OWN_SEGMENT_MIN`], in bytes.
const SHARED_SEGMENT: u64 = 20 << 20;

/// Size class of the requests that a segment serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Small,
    Large,
}

#[derive(Debug)]
struct Segment {
    class: Class,
    len: u64,
    free: bool,
}

/// A stretch of a segment.
#[derive(Debug, Clone, Copy)]
struct Piece {
    segment: u64,
    len: u64,
    free: bool,
}

/// All segments and their pieces, by start address.
#[derive(Debug)]
pub(super) struct Segments {
    block: BlockSize,
    segments: BTreeMap<u64, Segment>,
    pieces: BTreeMap<u64, Piece>,
    /// Free pieces as (class, length, address), the shortest first.
    free: BTreeSet<(Class, u64, u64)>,
    size: u64,
}

/// Returns the least memory that an object of a size needs. Sizes are clamped to twice the largest
/// cap, which no cap allows either.
pub(super) fn rounded(size: Bytes) -> Bytes {
    Bytes(size.0.clamp(1, 2 * CAP_MAX.0).next_multiple_of(QUANTUM))
}

fn class_of(rounded: u64) -> Class {
    if rounded <= SMALL_MAX { Class::Small } else { Class::Large }
}

impl Segments {
    pub(super) fn new(block: BlockSize) -> Self {
        Self { block, segments: BTreeMap::new(), pieces: BTreeMap::new(), free: BTreeSet::new(), size: 0 }
    }

    /// Returns the length of a new segment for a request.
    fn segment_for(&self, rounded: u64) -> u64 {
        let len = match class_of(rounded) {
            Class::Small => SMALL_SEGMENT,
            Class::Large if rounded < OWN_SEGMENT_MIN => SHARED_SEGMENT,
            Class::Large => rounded,
        };
        self.block.round_up(Bytes(len)).0
    }

    /// Returns the memory of all segments.
    pub(super) fn size(&self) -> Bytes {
        Bytes(self.size)
    }

    /// Returns the size of the new segment that a request needs; `None` if a free piece serves the
    /// request.
    pub(super) fn short(&self, size: Bytes) -> Option<Bytes> {
        let len = rounded(size).0;
        self.best_fit(len).is_none().then(|| Bytes(self.segment_for(len)))
    }

    fn best_fit(&self, len: u64) -> Option<(Class, u64, u64)> {
        let class = class_of(len);
        self.free.range((class, len, 0)..).next().copied().filter(|&(found, ..)| found == class)
    }

    /// Adds the segment that a request needs.
    pub(super) fn grow(&mut self, size: Bytes) -> StoreExtent {
        let len = rounded(size).0;
        let class = class_of(len);
        let len = self.segment_for(len);
        let at = self.gap(len);
        self.segments.insert(at, Segment { class, len, free: true });
        self.pieces.insert(at, Piece { segment: at, len, free: true });
        self.free.insert((class, len, at));
        self.size += len;
        StoreExtent { at, len: Bytes(len) }
    }

    /// Returns the lowest gap of `len` addresses between segments, or the end of the last segment.
    fn gap(&self, len: u64) -> u64 {
        let mut at = 0;
        for (&start, segment) in &self.segments {
            if start - at >= len {
                break;
            }
            at = start + segment.len;
        }
        at
    }

    /// Takes a piece for a request. Returns `None` if no free piece is long enough, or if the piece
    /// cannot be split and is longer than `most`.
    pub(super) fn take(&mut self, size: Bytes, most: Bytes) -> Option<StoreExtent> {
        let len = rounded(size).0;
        let (class, found, at) = self.best_fit(len)?;
        let segment = self.pieces.get(&at)?.segment;
        let left = found - len;
        let split = match class {
            Class::Small => left >= QUANTUM,
            Class::Large => left > SMALL_MAX,
        };
        let len = if split { len } else { found };
        if len > most.0 {
            return None;
        }
        self.free.remove(&(class, found, at));
        if split {
            self.pieces.insert(at + len, Piece { segment, len: left, free: true });
            self.free.insert((class, left, at + len));
        }
        self.pieces.insert(at, Piece { segment, len, free: false });
        self.segments.get_mut(&segment)?.free = false;
        Some(StoreExtent { at, len: Bytes(len) })
    }

    /// Takes a piece back.
    pub(super) fn give_back(&mut self, extent: StoreExtent) {
        let mut at = extent.at;
        let Some(piece) = self.pieces.get(&at).copied() else { return };
        debug_assert!(!piece.free, "{extent:?} is given back twice");
        let Some(class) = self.segments.get(&piece.segment).map(|segment| segment.class) else { return };
        let mut len = piece.len;
        let neighbour = |other: &Piece| other.free && other.segment == piece.segment;
        if let Some((&after, &next)) = self.pieces.range(at + 1..).next().filter(|(_, next)| neighbour(next))
        {
            self.pieces.remove(&after);
            self.free.remove(&(class, next.len, after));
            len += next.len;
        }
        if let Some((&before, &prev)) =
            self.pieces.range(..at).next_back().filter(|(_, prev)| neighbour(prev))
        {
            self.pieces.remove(&at);
            self.free.remove(&(class, prev.len, before));
            (at, len) = (before, len + prev.len);
        }
        self.pieces.insert(at, Piece { len, free: true, ..piece });
        self.free.insert((class, len, at));
        if let Some(segment) = self.segments.get_mut(&piece.segment) {
            segment.free = segment.len == len;
        }
    }

    /// Releases wholly free segments, the highest first, until at most `keep` is left.
    pub(super) fn shrink(&mut self, keep: Bytes) -> Vec<StoreExtent> {
        let mut gone = Vec::new();
        for (&at, segment) in self.segments.iter().rev().filter(|(_, segment)| segment.free) {
            if self.size <= keep.0 {
                break;
            }
            self.size -= segment.len;
            self.pieces.remove(&at);
            self.free.remove(&(segment.class, segment.len, at));
            gone.push(StoreExtent { at, len: Bytes(segment.len) });
        }
        for extent in &gone {
            self.segments.remove(&extent.at);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(segments: &mut Segments, size: Bytes) -> StoreExtent {
        if segments.short(size).is_some() {
            segments.grow(size);
        }
        segments.take(size, Bytes(u64::MAX)).unwrap()
    }

    const fn extent(at: u64, len: u64) -> StoreExtent {
        StoreExtent { at, len: Bytes(len) }
    }

    #[test]
    fn segments_are_as_long_as_pytorchs() {
        for (size, segment) in [
            (Bytes(1), 2),
            (Bytes::mib(1), 2),
            (Bytes((1 << 20) + 1), 20),
            (Bytes::mib(9), 20),
            (Bytes::mib(10), 10),
            (Bytes::mib(11), 12),
            (Bytes::mib(120), 120),
        ] {
            assert_eq!(Segments::new(BlockSize::DEFAULT).short(size), Some(Bytes::mib(segment)), "{size}");
        }
    }

    #[test]
    fn pieces_are_split_and_join_again() {
        let mut segments = Segments::new(BlockSize::DEFAULT);
        let one = take(&mut segments, Bytes(1000));
        let two = take(&mut segments, Bytes(512));
        assert_eq!((one, two), (extent(0, 1024), extent(1024, 512)));
        segments.give_back(one);
        assert_eq!(take(&mut segments, Bytes(600)), one, "the rest of the segment is longer");
        segments.give_back(one);
        segments.give_back(two);
        assert_eq!(segments.pieces.len(), 1);
        assert_eq!(segments.shrink(Bytes::ZERO), [extent(0, 2 << 20)]);
        assert_eq!((segments.size(), segments.free.len()), (Bytes::ZERO, 0));
    }

    #[test]
    fn a_large_piece_is_split_only_if_more_than_a_mebibyte_is_left() {
        let mut segments = Segments::new(BlockSize::DEFAULT);
        assert_eq!(take(&mut segments, Bytes::mib(9)), extent(0, 9 << 20));
        assert_eq!(segments.take(Bytes::mib(10), Bytes::mib(10)), None, "the rest is too much");
        assert_eq!(take(&mut segments, Bytes::mib(10)), extent(9 << 20, 11 << 20));
        assert_eq!(segments.size(), Bytes::mib(20));
    }

    /// The paper's example of fragmentation (§9.2.4).
    #[test]
    fn two_free_segments_of_100_mib_do_not_serve_120_mib() {
        let mut segments = Segments::new(BlockSize::DEFAULT);
        let pieces = [take(&mut segments, Bytes::mib(100)), take(&mut segments, Bytes::mib(100))];
        pieces.into_iter().for_each(|piece| segments.give_back(piece));
        assert_eq!(segments.short(Bytes::mib(120)), Some(Bytes::mib(120)));
    }

    #[test]
    fn segments_in_use_are_not_released() {
        let mut segments = Segments::new(BlockSize::DEFAULT);
        let pieces = [1, 2, 3].map(|_| take(&mut segments, Bytes::mib(12)));
        segments.give_back(pieces[0]);
        segments.give_back(pieces[2]);
        assert_eq!(segments.shrink(Bytes::mib(24)), [extent(24 << 20, 12 << 20)]);
        assert_eq!(segments.shrink(Bytes::ZERO), [extent(0, 12 << 20)]);
        assert_eq!(take(&mut segments, Bytes::mib(12)), extent(0, 12 << 20), "the gap is used again");
    }
}
