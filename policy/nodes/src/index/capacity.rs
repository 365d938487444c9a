//! Amounts of data in the index: bytes, files and objects.

use millrace_types::Bytes;

/// The value that the index stores for an object.
pub trait IndexedObject {
    /// Returns the bytes that the object counts for. The result never changes.
    fn bytes(&self) -> Bytes;

    /// Returns the number of files that the object may have open. The result never changes.
    fn files(&self) -> u64;
}

/// An amount of data, or the limit of such an amount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexCapacity {
    pub bytes: Bytes,
    /// Number of open files.
    pub files: u64,
    /// Number of objects, copies included.
    pub objects: u64,
}

impl IndexCapacity {
    /// Returns the sum of two amounts.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            bytes: Bytes(self.bytes.get().saturating_add(other.bytes.get())),
            files: self.files.saturating_add(other.files),
            objects: self.objects.saturating_add(other.objects),
        }
    }

    pub(super) fn minus(self, less: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(less.bytes),
            files: self.files.saturating_sub(less.files),
            objects: self.objects.saturating_sub(less.objects),
        }
    }

    pub(super) fn within(self, limit: Self) -> bool {
        self.bytes <= limit.bytes && self.files <= limit.files && self.objects <= limit.objects
    }
}

/// Returns the capacity that one object takes.
pub(super) fn one(held: &impl IndexedObject) -> IndexCapacity {
    IndexCapacity { bytes: held.bytes(), files: held.files(), objects: 1 }
}
