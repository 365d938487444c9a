//! Handles to objects that were made on a GPU and stay in its memory. There is one [`ObjectHandle`] for each
//! object. The worker's index and each consumer hold it in an [`Arc`], and the object is dropped with the last of
//! them.
//!
//! The Gpu actor decides about the object's location. The actor may move the object to host memory
//! (`memory::elastic`), and the object is lost with its executor.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_core::ids::ObjectKey;
use millrace_core::ids::RequestKey;
use millrace_proto::executor::ObjectPart;
use millrace_types::{GpuIndex, Incarnation};
use tokio::sync::oneshot;

use super::queue::{InputMoved, QueueAddress};
use super::reader::TransferReader;
use super::request::{HostBytes, ObjectLost, ObjectRequest, Reply};
use crate::actor_runtime::Mailbox;
use crate::port::Descriptor;

/// The location of an object.
#[derive(Debug, Clone)]
pub(crate) enum HandleLocation {
    /// The object is being written, in this executor's GPU or to the host.
    Coming,
    /// The object is in the GPU's memory, as this executor mapped it.
    Gpu(Incarnation),
    /// The object is in host memory.
    Host(Descriptor),
    /// The object is lost.
    Lost,
}

/// The shared handle of an object that was made on a GPU.
pub(crate) struct ObjectHandle {
    pub(crate) gpu: GpuIndex,
    /// Key of the object, unique on the node.
    pub(crate) key: ObjectKey,
    pub(crate) bytes: u64,
    state: Mutex<State>,
    home: Mailbox<ObjectRequest>,
}

struct State {
    place: HandleLocation,
    /// Requests of the node that read the object, with the queue that is notified for each. Bounded by
    /// the node's requests.
    readers: BTreeMap<RequestKey, Arc<QueueAddress>>,
}

/// A range of an object's bytes, as a tensor's contents.
#[derive(Debug, Clone)]
pub(crate) struct ObjectRange {
    pub(crate) object: Arc<ObjectHandle>,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl ObjectHandle {
    /// Returns the handle of an object that is being written.
    pub(crate) fn new(gpu: GpuIndex, key: ObjectKey, bytes: u64, home: Mailbox<ObjectRequest>) -> Self {
        let state = Mutex::new(State { place: HandleLocation::Coming, readers: BTreeMap::new() });
        Self { gpu, key, bytes, state, home }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn place(&self) -> HandleLocation {
        self.lock().place.clone()
    }

    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.lock().place, HandleLocation::Lost)
    }

    /// Sets the object's location. If the object entered or left a GPU's memory, the queue is
    /// notified for each request that reads it, because another GPU may serve the request better
    /// now.
    pub(crate) fn moves_to(&self, place: HandleLocation) {
        let on_gpu = |place: &HandleLocation| matches!(place, HandleLocation::Gpu(_));
        let mut state = self.lock();
        let moved = on_gpu(&state.place) != on_gpu(&place);
        state.place = place;
        for (reader, queue) in state.readers.iter().filter(|_| moved) {
            queue.post(InputMoved(*reader));
        }
    }

    /// Adds a request that reads the object. The queue is notified when the object moves.
    pub(crate) fn read_by(&self, reader: RequestKey, queue: &Arc<QueueAddress>) {
        self.lock().readers.insert(reader, Arc::clone(queue));
    }

    /// Removes a request that read the object.
    pub(crate) fn read_no_more(&self, reader: RequestKey) {
        self.lock().readers.remove(&reader);
    }

    /// Tells the Gpu actor whether a request that reads the object waits at this position of the
    /// queue.
    pub(crate) fn queued(&self, position: u64, waits: bool) {
        self.home.post(ObjectRequest::ReaderQueued { object: self.key, place: position, waits });
    }

    /// Requests bytes of the object in host memory, with a copy from the GPU if necessary.
    pub(crate) fn ask(&self, offset: u64, bytes: u64, reader: TransferReader, reply: Reply) {
        match self.place() {
            HandleLocation::Host(fd) => reply.send(Ok((fd, offset))),
            HandleLocation::Lost => reply.send(Err(ObjectLost)),
            HandleLocation::Coming | HandleLocation::Gpu(_) => {
                let part = ObjectPart { object: self.key.0, offset, bytes };
                self.home.post(ObjectRequest::Fetch { part, reader, reply });
            }
        }
    }
}

impl ObjectRange {
    /// Waits for these bytes in host memory. Returns the memory and the offset of the first byte.
    pub(crate) async fn on_host(&self, reader: TransferReader) -> HostBytes {
        let (answer, answered) = oneshot::channel();
        self.object.ask(self.offset, self.bytes, reader, Reply::awaited(answer));
        answered.await.unwrap_or(Err(ObjectLost))
    }
}

impl fmt::Debug for ObjectHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, key, bytes, .. } = self;
        f.debug_struct("ObjectHandle")
            .field("gpu", gpu)
            .field("key", key)
            .field("bytes", bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for ObjectHandle {
    fn drop(&mut self) {
        self.home.post(ObjectRequest::Discard(self.key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor_runtime::spawn_forwarder;

    #[test]
    fn the_queue_is_notified_for_each_reader_when_an_object_enters_or_leaves_a_gpu() {
        actix::System::new().block_on(async {
            let (mailbox, mut told) = spawn_forwarder();
            let (home, _) = spawn_forwarder();
            let queue = Arc::new(QueueAddress::default());
            queue.publish(Some(mailbox));
            let kept = ObjectHandle::new(GpuIndex(0), ObjectKey(7), 9, home);
            kept.read_by(RequestKey(1), &queue);
            kept.moves_to(HandleLocation::Gpu(Incarnation(1)));
            kept.moves_to(HandleLocation::Gpu(Incarnation(1)));
            kept.read_by(RequestKey(2), &queue);
            kept.read_no_more(RequestKey(1));
            kept.moves_to(HandleLocation::Lost);
            let last = RequestKey(3);
            queue.post(InputMoved(last));
            let mut moved = Vec::new();
            while let Some(InputMoved(key)) = told.recv().await.filter(|notice| *notice != InputMoved(last)) {
                moved.push(key);
            }
            assert_eq!(moved, [RequestKey(1), RequestKey(2)]);
        });
    }
}
