//! Reservations of object memory for the state of functions. State is stored among the objects, but
//! has no object names.

use millrace_nodes::index::IndexCapacity;
use millrace_types::Bytes;

use super::ObjectStore;

/// A reservation of object memory. Dropping it releases the memory.
#[derive(Debug)]
pub(crate) struct ObjectReservation {
    objects: ObjectStore,
    room: IndexCapacity,
}

impl ObjectStore {
    /// Reserves memory for `tensors` tensors with `bytes` bytes in total. Returns `None` if the
    /// memory does not suffice.
    pub(crate) fn claim(&self, bytes: Bytes, tensors: u64) -> Option<ObjectReservation> {
        let room = IndexCapacity { bytes, files: tensors, objects: tensors };
        self.index().reserve_room(room).then(|| ObjectReservation { objects: self.clone(), room })
    }
}

impl Drop for ObjectReservation {
    fn drop(&mut self) {
        self.objects.index().unclaim(self.room);
    }
}
