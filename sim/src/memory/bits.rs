//! Sets of blocks within a partition, as the bits of a word.

/// A bit for each block of a partition, the first block lowest.
pub(super) type Word = u128;

/// The first `len` blocks.
pub(super) fn first(len: u32) -> Word {
    if len >= Word::BITS { Word::MAX } else { (1 << len) - 1 }
}

/// `len` blocks from `start`.
pub(super) fn stretch(start: u32, len: u32) -> Word {
    first(len) << start
}

/// Where `len` blocks of `free` begin that follow on each other.
pub(super) fn fits(free: Word, len: u32) -> Word {
    // After each turn a bit says that `done` blocks follow on each other from there.
    let (mut found, mut done) = (free, 1);
    while done < len {
        let by = done.min(len - done);
        found &= found >> by;
        done += by;
    }
    found
}

/// For each step, its multiples below the width of a word. Looked up for every partition there is.
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

/// The multiples of `step` at which `step` blocks end within `len`.
pub(super) fn multiples(step: u32, len: u32) -> Word {
    MULTIPLES[step as usize] & first(len / step * step)
}

/// Where buddies of `len` blocks (a power of two) are wholly free.
pub(super) fn buddies(free: Word, len: u32) -> Word {
    if len > Word::BITS { 0 } else { fits(free, len) & multiples(len, Word::BITS) }
}

/// Where free buddies of `len` blocks begin whose parents are not free.
pub(super) fn holes(free: Word, len: u32) -> Word {
    let parents = buddies(free, len * 2);
    buddies(free, len) & !(parents | parents.checked_shl(len).unwrap_or(0))
}

/// The bits that are set, as (first, how many) of each run.
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

/// The bits that are set.
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
    fn stretches_are_found_wherever_they_begin() {
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
    fn a_hole_is_as_large_as_it_can_be() {
        let free = 0b1111_0100;
        assert_eq!([1, 2, 4, 8].map(|len| holes(free, len)), [0b100, 0, 0b1_0000, 0]);
        assert_eq!([64, 128].map(|len| holes(Word::MAX, len)), [0, 1]);
    }

    #[test]
    fn runs_and_bits_are_told_in_order() {
        assert_eq!(runs(0b1100_1110).collect::<Vec<_>>(), [(1, 3), (6, 2)]);
        assert_eq!(runs(Word::MAX).collect::<Vec<_>>(), [(0, 128)]);
        assert_eq!(each(0b1001).collect::<Vec<_>>(), [0, 3]);
    }
}
