//! Reservations of object memory for the state of functions. State is stored among the objects, but
//! has no object names.

use millrace_policy::index::Limit;
use millrace_types::Bytes;

use super::Objects;

/// A reservation of object memory. Dropping it releases the memory.
#[derive(Debug)]
pub(crate) struct Claim {
    objects: Objects,
    room: Limit,
}

impl Objects {
    /// Reserves memory for `tensors` tensors with `bytes` bytes in total. Returns `None` if the
    /// memory does not suffice.
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
