//! MessagePack that a disk or another process has written. The nesting is bounded, because each
//! level uses stack and a stack overflow ends the process. Maps and sets allocate memory for the
//! rows that arrived, never for a length that a header announces.

use std::collections::BTreeSet;
use std::io;
use std::marker::PhantomData;

use imbl::{OrdMap, OrdSet};
use rmp_serde::Deserializer;
use rmp_serde::decode::Error;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer as SerdeDeserializer};

/// Maximum nesting that is read; every written value is far below.
pub const NESTING_MAX: usize = 128;

/// Decodes a value.
///
/// # Errors
/// If the bytes are no such value, or nest deeper than [`NESTING_MAX`].
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    let mut deserializer = Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(NESTING_MAX);
    T::deserialize(&mut deserializer)
}

/// Decodes a value from a reader, in pieces.
///
/// # Errors
/// As [`from_slice`], and the errors of the reader.
pub fn from_read<T: DeserializeOwned>(from: impl io::Read) -> Result<T, Error> {
    let mut deserializer = Deserializer::new(from);
    deserializer.set_max_depth(NESTING_MAX);
    T::deserialize(&mut deserializer)
}

/// Decodes a map row by row. imbl's own decoder allocates memory for the number of rows in the
/// map's header.
pub(crate) fn map<'de, D, K, V>(from: D) -> Result<OrdMap<K, V>, D::Error>
where
    D: SerdeDeserializer<'de>,
    K: Ord + Clone + Deserialize<'de>,
    V: Clone + Deserialize<'de>,
{
    from.deserialize_map(MapVisitor(PhantomData))
}

/// Decodes a set item by item.
pub(crate) fn set<'de, D, K>(from: D) -> Result<OrdSet<K>, D::Error>
where
    D: SerdeDeserializer<'de>,
    K: Ord + Clone + Deserialize<'de>,
{
    // The standard library's set allocates no memory in advance.
    Ok(BTreeSet::deserialize(from)?.into_iter().collect())
}

struct MapVisitor<K, V>(PhantomData<(K, V)>);

impl<'de, K, V> Visitor<'de> for MapVisitor<K, V>
where
    K: Ord + Clone + Deserialize<'de>,
    V: Clone + Deserialize<'de>,
{
    type Value = OrdMap<K, V>;

    fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut rows: A) -> Result<Self::Value, A::Error> {
        let mut map = OrdMap::new();
        while let Some((key, value)) = rows.next_entry()? {
            map.insert(key, value);
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;

    use super::*;

    /// rmp-serde allows 1,024 levels, at which a thread with 2 MiB of stack overflowed.
    #[test]
    fn deep_nesting_is_refused_before_the_stack_ends() {
        let nested = |levels: usize| [vec![0x91; levels], vec![0xc0]].concat();
        for levels in [1, NESTING_MAX - 1] {
            assert!(from_slice::<IgnoredAny>(&nested(levels)).is_ok());
        }
        for levels in [NESTING_MAX + 1, 1_000, 100_000] {
            assert!(matches!(from_slice::<IgnoredAny>(&nested(levels)), Err(Error::DepthLimitExceeded)));
            let read = from_read::<IgnoredAny>(&nested(levels)[..]);
            assert!(matches!(read, Err(Error::DepthLimitExceeded)));
        }
    }

    /// A map of 2^32 - 1 rows would need some hundred gigabytes, and end the process.
    #[test]
    fn an_announced_length_takes_no_memory() {
        #[derive(Debug, serde::Deserialize)]
        struct Holder {
            #[serde(deserialize_with = "super::map")]
            _rows: OrdMap<u64, [u64; 8]>,
            #[serde(deserialize_with = "super::set")]
            _items: OrdSet<u64>,
        }
        let rows = [&[0x92, 0xdf][..], &[0xff; 4]].concat();
        assert!(from_slice::<Holder>(&rows).is_err());
        assert!(from_read::<Holder>(&rows[..]).is_err());
        let items = [&[0x92, 0x80, 0xdd][..], &[0xff; 4]].concat();
        assert!(from_slice::<Holder>(&items).is_err());
        assert!(from_slice::<Holder>(&[0x92, 0x80, 0x90]).is_ok());
    }
}
