//! The encoding of a log entry in sled.
//!
//! An entry is a sealed record (see [`crate::frame`]) split into parts of [`PART_BYTES`]. The head
//! is stored under the index as 8 big-endian bytes, and begins with the record's length. Each
//! further part is stored under the same 8 bytes followed by the part's number as 2 big-endian
//! bytes, so that parts sort behind their head.
//!
//! Entries are split because sled stores a leaf of up to 16 values as a single item, and writes an
//! item above 128 KiB to a file of its own that sled never syncs. Such an entry would be
//! acknowledged without being durable.

use std::iter::Peekable;
use std::path::Path;
use std::sync::Arc;

use crate::error::Error;
use crate::frame::{self, RecordFault};

/// The format of log entries.
///
/// | format | since | content |
/// |---|---|---|
/// | 1 | 0.1.0 | openraft 0.9's `Entry` in MessagePack with field names |
/// | 2 | 0.1.0 | the same, of a group with a single leader in each term |
const FORMAT: u8 = 2;

/// Size of a value in sled, in bytes. A leaf holds up to 16 values, and for a moment those of a
/// merged sibling too: under 100 KiB, below the limit of 128 KiB.
pub(crate) const PART_BYTES: usize = 4096;

/// Maximum size of an encoded entry, in bytes. Proposers keep their batches below it.
pub const ENTRY_BYTES_MAX: usize = 1 << 20;

const _: () = assert!(ENTRY_BYTES_MAX / PART_BYTES < u16::MAX as usize, "a part's number is 16 bits");

const LENGTH_BYTES: usize = size_of::<u32>();

/// A key and a value in sled.
pub(crate) type SledPair = (Vec<u8>, Vec<u8>);

/// Returns the key of an entry's head: the first key of the entry, above all keys of the previous
/// entry.
pub(crate) fn key(index: u64) -> [u8; 8] {
    index.to_be_bytes()
}

/// Returns whether a key is the first of an entry.
pub(crate) fn is_head(key: &[u8]) -> bool {
    key.len() == size_of::<u64>()
}

/// Returns the index of the entry that a key of the `logs` tree belongs to.
fn index_of(key: &[u8]) -> Result<u64, Error> {
    match key.split_first_chunk::<8>() {
        Some((index, [] | [_, _])) => Ok(u64::from_be_bytes(*index)),
        _ => {
            Err(Error::Damaged { what: "the log".to_owned(), flaw: format!("a key of {} bytes", key.len()) })
        }
    }
}

/// Splits an entry into pairs for sled.
pub(crate) fn encode(index: u64, body: &[u8]) -> Result<Vec<SledPair>, Error> {
    let sealed = frame::seal(FORMAT, &key(index), body);
    let length = u32::try_from(sealed.len()).ok().filter(|_| body.len() <= ENTRY_BYTES_MAX);
    let Some(length) = length else {
        return Err(Error::EntryTooLarge { index, bytes: body.len(), max: ENTRY_BYTES_MAX });
    };
    let (first, rest) = sealed.split_at(sealed.len().min(PART_BYTES));
    let mut head = length.to_be_bytes().to_vec();
    head.extend(first);
    let mut pairs = vec![(key(index).to_vec(), head)];
    for (part, bytes) in (1_u16..).zip(rest.chunks(PART_BYTES)) {
        let mut key = key(index).to_vec();
        key.extend(part.to_be_bytes());
        pairs.push((key, bytes.to_vec()));
    }
    Ok(pairs)
}

/// Assembles entries from sled's pairs in key order. Ends after the first error.
pub(crate) struct EntryRecords<I: Iterator> {
    pairs: Peekable<I>,
    /// The path of the store, for messages.
    store: Arc<Path>,
}

impl<I> EntryRecords<I>
where
    I: Iterator<Item = Result<(sled::IVec, sled::IVec), sled::Error>>,
{
    pub(crate) fn new(pairs: I, store: Arc<Path>) -> Self {
        Self { pairs: pairs.peekable(), store }
    }

    fn assemble(&mut self, key: &[u8], head: &[u8]) -> Result<(u64, Vec<u8>), Error> {
        let index = index_of(key)?;
        let what = || format!("log entry {index}");
        let damaged = |flaw: String| Error::Damaged { what: what(), flaw };
        if !is_head(key) {
            return Err(damaged("its head is missing".to_owned()));
        }
        let Some((length, first)) = head.split_first_chunk::<LENGTH_BYTES>() else {
            return Err(damaged(format!("{} bytes are too few for a head", head.len())));
        };
        let length = u32::from_be_bytes(*length) as usize;
        let mut sealed = first.to_vec();
        for part in 1_u16.. {
            let Some(Ok((next, bytes))) = self.pairs.peek() else { break };
            let Some((_, number)) = next.split_first_chunk::<8>().filter(|(of, _)| of[..] == *key) else {
                break;
            };
            if *number != part.to_be_bytes() {
                return Err(damaged(format!("part {part} is missing")));
            }
            sealed.extend_from_slice(bytes);
            self.pairs.next();
        }
        if sealed.len() != length {
            return Err(damaged(format!("it has {} of {length} bytes", sealed.len())));
        }
        let body =
            frame::unseal(FORMAT, key, &sealed).map_err(|flaw: RecordFault| Error::flaw(what(), flaw))?;
        Ok((index, body.to_vec()))
    }
}

impl<I> Iterator for EntryRecords<I>
where
    I: Iterator<Item = Result<(sled::IVec, sled::IVec), sled::Error>>,
{
    type Item = Result<(u64, Vec<u8>), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.pairs.next()? {
            Ok((key, head)) => Some(self.assemble(&key, &head)),
            Err(source) => Some(Err(Error::sled("reading the log", &self.store, source))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(pairs: &[SledPair]) -> Vec<Result<(u64, Vec<u8>), String>> {
        let stored = pairs.iter().map(|(k, v)| Ok((sled::IVec::from(&k[..]), sled::IVec::from(&v[..]))));
        EntryRecords::new(stored, Path::new("store").into())
            .map(|record| record.map_err(|error| error.to_string()))
            .collect()
    }

    proptest! {
        #[test]
        fn entries_of_any_size_are_read_back_in_order(sizes in prop::collection::vec(0usize..20_000, 1..6), first in 0u64..u64::MAX - 10) {
            let entries: Vec<(u64, Vec<u8>)> =
                (first..).zip(&sizes).map(|(index, &size)| (index, vec![index as u8; size])).collect();
            let mut pairs: Vec<SledPair> = entries.iter().flat_map(|(index, body)| encode(*index, body).unwrap()).collect();
            prop_assert!(pairs.iter().all(|(_, value)| value.len() <= PART_BYTES + LENGTH_BYTES));
            pairs.sort();
            prop_assert_eq!(decode(&pairs), entries.into_iter().map(Ok).collect::<Vec<_>>());
        }

        #[test]
        fn a_missing_part_or_a_flipped_bit_is_an_error(size in 0usize..20_000, victim: prop::sample::Index, at: prop::sample::Index, bit in 0u8..8, cut: bool) {
            let mut pairs = encode(7, &vec![42; size]).unwrap();
            let victim = victim.index(pairs.len());
            if cut && pairs.len() > 1 {
                pairs.remove(victim);
            } else {
                let value = &mut pairs[victim].1;
                let at = at.index(value.len());
                value[at] ^= 1 << bit;
            }
            prop_assert!(decode(&pairs)[0].is_err());
        }
    }

    #[test]
    fn a_record_of_a_newer_format_is_refused_with_its_format() {
        let sealed = frame::seal(9, &key(3), b"from the future");
        let head = [&u32::try_from(sealed.len()).unwrap().to_be_bytes()[..], &sealed].concat();
        let refused = decode(&[(key(3).to_vec(), head)]);
        let message = refused[0].as_ref().unwrap_err();
        assert!(message.contains("log entry 3 is of format 9") && message.contains("newer"), "{message}");
    }

    #[test]
    fn an_entry_over_the_limit_is_refused_before_it_is_written() {
        let refused = encode(1, &vec![0; ENTRY_BYTES_MAX + 1]).unwrap_err();
        assert!(matches!(refused, Error::EntryTooLarge { index: 1, .. }));
    }
}
