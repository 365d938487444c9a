//! A map from counters that are mostly allocated in sequence. Values lie side by side: a lookup
//! among a million reads far memory once, for the value. A hash table of boxes would read far
//! memory three times: for the table, its slot and the box.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Counters of one page: as many as its mask has bits.
const PAGE: u64 = u64::BITS as u64;
/// Maximum number of values by which a full page grows.
const GROWS_MAX: usize = 8;

pub(super) type Hashed<K, V> = HashMap<K, V, BuildHasherDefault<CounterHasher>>;

/// A map from counters to values.
#[derive(Debug)]
pub(super) struct CounterMap<V> {
    /// Pages by their first counter divided by [`PAGE`]. No page is empty.
    pages: Hashed<u64, Page<V>>,
}

/// The values of [`PAGE`] counters.
#[derive(Debug)]
struct Page<V> {
    /// Bits of the present counters, the first counter in the lowest bit.
    mask: u64,
    /// Values in the order of their counters. The capacity is at most twice the length, and at most
    /// [`GROWS_MAX`] above the greatest length so far.
    values: Vec<V>,
}

/// Returns a counter's page, and its bit within the page.
fn split(count: u64) -> (u64, u64) {
    (count / PAGE, 1 << (count % PAGE))
}

impl<V> Page<V> {
    /// Returns the index of a bit's value, or the index of its insertion.
    fn place(&self, bit: u64) -> usize {
        (self.mask & (bit - 1)).count_ones() as usize
    }

    fn has(&self, bit: u64) -> bool {
        self.mask & bit != 0
    }
}

impl<V> CounterMap<V> {
    pub(super) fn get(&self, count: u64) -> Option<&V> {
        let (page, bit) = split(count);
        let page = self.pages.get(&page)?;
        page.values.get(page.place(bit)).filter(|_| page.has(bit))
    }

    pub(super) fn get_mut(&mut self, count: u64) -> Option<&mut V> {
        let (page, bit) = split(count);
        let page = self.pages.get_mut(&page)?;
        let place = page.place(bit);
        let has = page.has(bit);
        page.values.get_mut(place).filter(|_| has)
    }

    /// Sets the value of a counter.
    pub(super) fn insert(&mut self, count: u64, value: V) {
        let (page, bit) = split(count);
        let page = self.pages.entry(page).or_insert_with(|| Page { mask: 0, values: Vec::new() });
        let place = page.place(bit);
        if page.has(bit) {
            page.values[place] = value;
            return;
        }
        if page.values.len() == page.values.capacity() {
            page.values.reserve_exact(page.values.len().clamp(1, GROWS_MAX));
        }
        page.values.insert(place, value);
        page.mask |= bit;
    }

    pub(super) fn remove(&mut self, count: u64) -> Option<V> {
        let (number, bit) = split(count);
        let page = self.pages.get_mut(&number).filter(|page| page.has(bit))?;
        let value = page.values.remove(page.place(bit));
        page.mask &= !bit;
        if page.values.is_empty() {
            self.pages.remove(&number);
        } else if page.values.len() <= page.values.capacity() / 2 {
            page.values.shrink_to_fit();
        }
        Some(value)
    }
}

impl<V> Default for CounterMap<V> {
    fn default() -> Self {
        Self { pages: Hashed::default() }
    }
}

/// Hasher of page numbers and node names, with a multiplication for each eight bytes. `HashMap`'s
/// own hasher is slower, because of its resistance to chosen colliding keys. Here workers allocate
/// each counter once, and operators choose the names.
#[derive(Debug, Default)]
pub(super) struct CounterHasher(u64);

impl Hasher for CounterHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|&word| self.write_u64(u64::from_le_bytes(word)));
        if !rest.is_empty() {
            self.write_u64(rest.iter().fold(0, |word, &byte| word << 8 | u64::from(byte)));
        }
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        // 2^64 divided by the golden ratio: neighbours are hashed far apart.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        // The table uses the lowest bits, which so far depend only on the lowest bits of the input.
        self.0 ^ (self.0 >> 32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::hash::BuildHasher as _;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counters_with_equal_lowest_bits_hash_to_different_places() {
        let spread = BuildHasherDefault::<CounterHasher>::default();
        for step in [1, 1 << 10, 1 << 20, 1 << 32] {
            let places: BTreeSet<u64> = (0..1024).map(|n: u64| spread.hash_one(n * step) % 4096).collect();
            // As many distinct places as random draws would give: 4096 (1 - e^(-1/4)).
            assert!(places.len() > 800, "{} of 1024 places, {step} apart", places.len());
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Change {
        Insert(u64),
        Remove(u64),
        Double(u64),
    }

    fn change() -> impl Strategy<Value = Change> {
        let count = prop_oneof![0..200_u64, Just(u64::MAX - 1), Just(u64::MAX)];
        (count, 0..3).prop_map(|(count, what)| match what {
            0 => Change::Insert(count),
            1 => Change::Remove(count),
            _ => Change::Double(count),
        })
    }

    proptest! {
        #[test]
        fn pages_equal_a_map_and_have_at_most_twice_the_needed_capacity(changes in vec(change(), 0..400)) {
            let mut pages = CounterMap::default();
            let mut map = BTreeMap::new();
            for (turn, change) in changes.into_iter().enumerate() {
                match change {
                    Change::Insert(count) => {
                        pages.insert(count, turn);
                        map.insert(count, turn);
                    }
                    Change::Remove(count) => prop_assert_eq!(pages.remove(count), map.remove(&count)),
                    Change::Double(count) => {
                        let ours = pages.get_mut(count);
                        let wanted = map.get_mut(&count);
                        prop_assert_eq!(&ours, &wanted);
                        ours.into_iter().chain(wanted).for_each(|value| *value *= 2);
                    }
                }
                for count in (0..200).chain([u64::MAX - 1, u64::MAX]) {
                    prop_assert_eq!(pages.get(count), map.get(&count));
                }
                for page in pages.pages.values() {
                    prop_assert_eq!(page.values.len() as u32, page.mask.count_ones());
                    prop_assert!(!page.values.is_empty());
                    prop_assert!(page.values.capacity() <= 2 * page.values.len());
                }
            }
        }
    }
}
