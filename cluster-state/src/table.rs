//! A table of the state that counts its own bytes, so that a check of the quota does not visit
//! every record. In: rows that are inserted, changed and removed. Out: the bytes of all rows, and
//! the bytes of one tenant's rows. The count is not part of an encoded state: it is computed again
//! from the rows.
//!
//! A row counts with the bytes of its key and its record in a snapshot, or somewhat more
//! ([`TableRecord::bytes`]). A bound on the count therefore bounds the snapshot.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use imbl::OrdMap;
use millrace_types::{Digest, FunctionKey, NodeName, TenantName};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::packed;

pub(crate) trait TableRecord: Serialize {
    /// Returns the bytes of the encoded record, or a bound on them.
    fn bytes(&self) -> u64 {
        encoded_len(self)
    }
}

/// The key of a table's rows.
pub(crate) trait TableKey: Ord + Clone + Serialize {
    /// Returns the tenant that is charged for the row.
    fn tenant(&self) -> Option<&TenantName> {
        None
    }
}

impl TableKey for FunctionKey {
    fn tenant(&self) -> Option<&TenantName> {
        Some(&self.tenant)
    }
}

impl TableKey for TenantName {
    fn tenant(&self) -> Option<&TenantName> {
        Some(self)
    }
}

impl TableKey for Digest {}
impl TableKey for NodeName {}
impl TableKey for u64 {}

/// Returns the bytes of plain data as a snapshot encodes it. Allocates no memory.
pub(crate) fn encoded_len<T: Serialize + ?Sized>(value: &T) -> u64 {
    let mut counted = ByteCounter(0);
    rmp_serde::encode::write_named(&mut counted, value)
        .expect("plain data encodes, and counting its bytes cannot fail");
    counted.0
}

struct ByteCounter(u64);

impl io::Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Records by key. Reads use the map inside; every change goes through the table, so that the byte
/// count stays right.
pub(crate) struct CountedTable<K, V> {
    rows: OrdMap<K, Arc<V>>,
    bytes: u64,
    /// Bytes of each tenant's rows. A tenant without rows is not in the map.
    by_tenant: OrdMap<TenantName, u64>,
}

impl<K: TableKey, V: TableRecord> CountedTable<K, V> {
    /// Inserts a record, and replaces the record with the same key.
    pub(crate) fn insert(&mut self, key: K, record: Arc<V>) {
        let bytes = record.bytes();
        match self.rows.insert(key.clone(), record).map(|old| old.bytes()) {
            None => self.charge(&key, encoded_len(&key) + bytes),
            Some(before) if before != bytes => {
                self.charge(&key, bytes);
                self.discharge(&key, before);
            }
            Some(_) => {}
        }
    }

    /// Removes and returns a record.
    pub(crate) fn remove(&mut self, key: &K) -> Option<Arc<V>> {
        let record = self.rows.remove(key)?;
        self.discharge(key, row_bytes(key, &*record));
        Some(record)
    }

    /// Changes the record with this key in place, if the table has such a record.
    pub(crate) fn change(&mut self, key: &K, change: impl FnOnce(&mut V))
    where
        V: Clone,
    {
        let Some(record) = self.rows.get_mut(key) else { return };
        let before = record.bytes();
        change(Arc::make_mut(record));
        let after = record.bytes();
        if before != after {
            self.charge(key, after);
            self.discharge(key, before);
        }
    }

    /// Changes numbers of a record in place, which the bytes of the record do not depend on
    /// ([`TableRecord::bytes`]), so that the record is not counted again.
    pub(crate) fn change_numbers(&mut self, key: &K, change: impl FnOnce(&mut V))
    where
        V: Clone,
    {
        let Some(record) = self.rows.get_mut(key) else { return };
        let before = cfg!(debug_assertions).then(|| record.bytes());
        change(Arc::make_mut(record));
        debug_assert!(before.is_none_or(|before| before == record.bytes()), "only numbers changed");
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn bytes_of(&self, tenant: &TenantName) -> u64 {
        self.by_tenant.get(tenant).copied().unwrap_or(0)
    }

    fn charge(&mut self, key: &K, bytes: u64) {
        self.bytes += bytes;
        if let Some(tenant) = key.tenant() {
            let all = self.by_tenant.get(tenant).copied().unwrap_or(0);
            self.by_tenant.insert(tenant.clone(), all + bytes);
        }
    }

    fn discharge(&mut self, key: &K, bytes: u64) {
        self.bytes -= bytes;
        let Some(tenant) = key.tenant() else { return };
        match self.bytes_of(tenant) - bytes {
            0 => self.by_tenant.remove(tenant),
            left => self.by_tenant.insert(tenant.clone(), left),
        };
    }
}

fn row_bytes<K: TableKey, V: TableRecord>(key: &K, record: &V) -> u64 {
    encoded_len(key) + record.bytes()
}

impl<K: TableKey, V: TableRecord> From<OrdMap<K, Arc<V>>> for CountedTable<K, V> {
    fn from(rows: OrdMap<K, Arc<V>>) -> Self {
        let mut table = Self { rows: OrdMap::new(), bytes: 0, by_tenant: OrdMap::new() };
        for (key, record) in &rows {
            table.charge(key, row_bytes(key, &**record));
        }
        Self { rows, ..table }
    }
}

impl<K, V> Default for CountedTable<K, V> {
    fn default() -> Self {
        Self { rows: OrdMap::new(), bytes: 0, by_tenant: OrdMap::new() }
    }
}

impl<K: Clone, V> Clone for CountedTable<K, V> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone(), bytes: self.bytes, by_tenant: self.by_tenant.clone() }
    }
}

impl<K: Ord, V: PartialEq> PartialEq for CountedTable<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows && self.bytes == other.bytes && self.by_tenant == other.by_tenant
    }
}

impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for CountedTable<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

impl<K, V> Deref for CountedTable<K, V> {
    type Target = OrdMap<K, Arc<V>>;

    fn deref(&self) -> &Self::Target {
        &self.rows
    }
}

impl<'a, K: Ord, V> IntoIterator for &'a CountedTable<K, V> {
    type Item = <&'a OrdMap<K, Arc<V>> as IntoIterator>::Item;
    type IntoIter = <&'a OrdMap<K, Arc<V>> as IntoIterator>::IntoIter;

    fn into_iter(self) -> Self::IntoIter {
        self.rows.iter()
    }
}

/// The encoded form is the map alone.
impl<K: Ord + Serialize, V: Serialize> Serialize for CountedTable<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.rows.serialize(serializer)
    }
}

impl<'de, K: TableKey + Deserialize<'de>, V: TableRecord + Deserialize<'de>> Deserialize<'de>
    for CountedTable<K, V>
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        packed::map(deserializer).map(Self::from)
    }
}
