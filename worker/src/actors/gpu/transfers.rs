//! The transfers of objects to and from a GPU that are under way.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_core::ids::{ObjectKey, RunId, TransferId};
use millrace_types::GpuIndex;
use tracing::Span;

use crate::object_handle::{ObjectHandle, Reply};
use crate::port::Descriptor;

/// The bit that separates transfer ids of objects from transfer ids of weights. Each GPU counts both from
/// its own index, shifted by 40 bits.
const OF_OBJECTS: u64 = 1 << 39;

/// The purpose of a transfer of an object to this GPU.
#[derive(Debug)]
pub(super) enum TransferPurpose {
    /// A run reads the bytes here, as its input number `place`.
    Input { run: RunId, place: usize, source: Arc<ObjectHandle>, offset: u64 },
    /// The store reloads an object that had migrated to the host.
    Reload,
    /// The transfer is cancelled. The source's handle is held until its copies have ended, because the
    /// copies still read the source's blocks.
    Cancelled { _source: Option<Arc<ObjectHandle>> },
}

/// An object that is copied to this GPU.
#[derive(Debug)]
pub(super) struct IncomingObject {
    pub(super) errand: TransferPurpose,
    pub(super) bytes: u64,
    /// The transfer, once the store has placed the object.
    pub(super) transfer: Option<TransferId>,
}

/// The objects that are copied to this GPU, and the objects that other GPUs copy from this GPU.
#[derive(Debug, Default)]
pub(super) struct ObjectTransfers {
    transfers: u64,
    /// The transfers to this GPU, by the objects that the transfers fill.
    pub(super) coming: BTreeMap<ObjectKey, IncomingObject>,
    /// The objects that other GPUs copy from here, by the transfers.
    pub(super) lent: BTreeMap<TransferId, ObjectKey>,
}

impl ObjectTransfers {
    /// Returns a new id for a transfer of an object to or from this GPU.
    pub(super) fn new_transfer(&mut self, gpu: GpuIndex) -> TransferId {
        self.transfers += 1;
        TransferId(u64::from(gpu.0) << 40 | OF_OBJECTS | self.transfers)
    }

    /// Returns the run that will read an object here once the object has arrived.
    pub(super) fn reader_of(&self, object: ObjectKey) -> Option<RunId> {
        match self.coming.get(&object)?.errand {
            TransferPurpose::Input { run, .. } => Some(run),
            TransferPurpose::Reload | TransferPurpose::Cancelled { .. } => None,
        }
    }

    /// Forgets all transfers of objects: the executor is gone, and the objects with it.
    pub(super) fn clear(&mut self) {
        self.coming.clear();
        self.lent.clear();
    }
}

/// The purpose of a copy to the host.
#[derive(Debug)]
pub(super) enum HostCopyPurpose {
    /// The store has no room for the object, and tracks it on the host.
    Refused(ObjectKey),
    /// The store neither accepts nor tracks the object.
    Declined(ObjectKey),
    /// The store migrates the object to make room.
    Migrate(ObjectKey),
    /// A reader outside this GPU asked for bytes of the object. The handle keeps the object alive.
    Fetch(Arc<ObjectHandle>, Reply),
}

/// A copy to the host that is under way.
#[derive(Debug)]
pub(super) struct OutgoingTransfer {
    pub(super) purpose: HostCopyPurpose,
    pub(super) to: Descriptor,
    /// Whether the copy is a transfer under the fabric's grants. Small copies are not.
    pub(super) granted: bool,
    /// The span of the copy in the trace of the request that produced the output; otherwise disabled.
    pub(super) span: Span,
}
