//! Sets of blocks within a partition, as bits of a word.

/// A set with a bit for each block of a partition. The lowest bit is the first block.
pub(super) type Word = u128;

/// Returns the set of the first `len` blocks.
pub(super) fn first(len: u32) -> Word {
    if len >= Word::BITS { Word::MAX } else { (1 << len) - 1 }
}

/// Returns the set of `len` blocks from `start`.
pub(super) fn stretch(start: u32, len: u32) -> Word {
    first(len) << start
}

/// Returns the blocks at which a run of `len` blocks of `free` begins.
pub(super) fn fits(free: Word, len: u32) -> Word {
    // After each round, a set bit marks the begin of a run of `done` free blocks.
    let mut found = free;
    let mut done = 1;
    while done < len {
        let by = done.min(len - done);
        found &= found >> by;
        done += by;
    }
    found
}

/// The multiples of each step below the width of a word. A table, because each search reads the multiples for
/// every partition.
const MULTIPLES: [Word; Word::BITS as usize + 1] = {
    let mut table = [1; Word::BITS as usize + 1];
    let mut step = 1;
    while step < Word::BITS {
        let mut bit = step;
        while bit < Word::BITS {
            table[step as usize] |= 1 << bit;
            bit += step;
        }
        step += 1;
    }
    table
};

/// Returns the multiples of `step` from which `step` blocks fit within the first `len`.
pub(super) fn multiples(step: u32, len: u32) -> Word {
    MULTIPLES[step as usize] & first(len / step * step)
}

/// Returns the first blocks of the wholly free buddies of `len` blocks, a power of two.
pub(super) fn buddies(free: Word, len: u32) -> Word {
    if len > Word::BITS { 0 } else { fits(free, len) & multiples(len, Word::BITS) }
}

/// Returns the first blocks of the free buddies of `len` blocks whose parents are not wholly free.
pub(super) fn holes(free: Word, len: u32) -> Word {
    let parents = buddies(free, len * 2);
    buddies(free, len) & !(parents | parents.checked_shl(len).unwrap_or(0))
}

/// Returns the runs of set bits in ascending order, each as its first bit and its length.
pub(super) fn runs(mut word: Word) -> impl Iterator<Item = (u32, u32)> {
    std::iter::from_fn(move || {
        let start = word.trailing_zeros();
        (start < Word::BITS).then(|| {
            let len = (word >> start).trailing_ones();
            word &= !stretch(start, len);
            (start, len)
        })
    })
}

/// Returns the set bits in ascending order.
pub(super) fn each(mut word: Word) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros();
        (bit < Word::BITS).then(|| {
            word &= word - 1;
            bit
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fits_finds_runs_at_every_position() {
        for len in 1..=Word::BITS {
            let naive = |free: Word| {
                let begins = |start: &u32| (*start..start + len).all(|bit| free >> bit & 1 == 1);
                (0..=Word::BITS - len).filter(begins).fold(0, |word, start| word | 1 << start)
            };
            for free in [Word::MAX, 0, 0b1110_1101, 0xffff_0fff_00ff << 70, Word::MAX >> 1] {
                assert_eq!(fits(free, len), naive(free), "{len} in {free:b}");
            }
        }
    }

    #[test]
    fn holes_finds_only_the_largest_free_buddies() {
        let free = 0b1111_0100;
        assert_eq!([1, 2, 4, 8].map(|len| holes(free, len)), [0b100, 0, 0b1_0000, 0]);
        assert_eq!([64, 128].map(|len| holes(Word::MAX, len)), [0, 1]);
    }

    #[test]
    fn runs_and_bits_are_listed_in_ascending_order() {
        assert_eq!(runs(0b1100_1110).collect::<Vec<_>>(), [(1, 3), (6, 2)]);
        assert_eq!(runs(Word::MAX).collect::<Vec<_>>(), [(0, 128)]);
        assert_eq!(each(0b1001).collect::<Vec<_>>(), [0, 3]);
    }
}
