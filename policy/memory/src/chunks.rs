//! The set of a model's chunks of weights that have arrived.

use std::ops::Range;

/// A dense set of chunks in `0..len`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkSet {
    words: Vec<u64>,
    len: u32,
    held: u32,
}

impl ChunkSet {
    /// Returns an empty set of up to `len` chunks.
    #[must_use]
    pub fn empty(len: u32) -> Self {
        Self { words: vec![0; len.div_ceil(64) as usize], len, held: 0 }
    }

    /// Adds a range. Chunks that are already in the set stay.
    ///
    /// # Panics
    /// If the range ends beyond the set: a bug of the caller.
    pub fn insert(&mut self, range: Range<u32>) {
        assert!(range.end <= self.len, "{range:?} of {} chunks", self.len);
        for chunk in range {
            let bit = 1 << (chunk % 64);
            let word = &mut self.words[(chunk / 64) as usize];
            self.held += u32::from(*word & bit == 0);
            *word |= bit;
        }
    }

    /// Returns the number of chunks in the set.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Whether all chunks are in the set.
    #[must_use]
    pub fn complete(&self) -> bool {
        self.held == self.len
    }

    /// Returns the chunks that are not in the set, as ranges in order.
    #[must_use]
    pub fn missing(&self) -> Vec<Range<u32>> {
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for chunk in (0..self.len).filter(|&chunk| !self.holds(chunk)) {
            match ranges.last_mut() {
                Some(last) if last.end == chunk => last.end += 1,
                _ => ranges.push(chunk..chunk + 1),
            }
        }
        ranges
    }

    /// Whether a chunk is in the set.
    #[must_use]
    pub fn holds(&self, chunk: u32) -> bool {
        self.words[(chunk / 64) as usize] & (1 << (chunk % 64)) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_returns_the_absent_chunks_as_ranges() {
        let mut set = ChunkSet::empty(130);
        set.insert(5..70);
        set.insert(60..65);
        set.insert(129..130);
        assert_eq!(set.held(), 66);
        assert_eq!(set.missing(), [0..5, 70..129]);
        assert!(!set.complete());
        set.insert(0..130);
        assert!(set.complete());
        assert_eq!(set.missing(), []);
    }

    #[test]
    fn an_empty_model_is_complete() {
        assert!(ChunkSet::empty(0).complete());
    }
}
