//! Room that the state of functions takes of what objects may take: it lies where they lie, and whoever
//! keeps it has no names for it.

use millrace_policy::index::Limit;
use millrace_types::Bytes;

use super::Objects;

/// So much room, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    objects: Objects,
    room: Limit,
}

impl Objects {
    /// Takes room for so many tensors of so many bytes together; `None` where there is none.
    pub(crate) fn claim(&self, bytes: Bytes, tensors: u64) -> Option<Claim> {
        let room = Limit { bytes, files: tensors, objects: tensors };
        self.index().claim(room).then(|| Claim { objects: self.clone(), room })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.objects.index().unclaim(self.room);
    }
}
