//! An object that was made on a GPU and stays in its memory: a handle, which whoever takes it holds.
//! With the last handle the object goes.
//!
//! Where it is now is the Gpu actor's to decide: it may have to leave for host memory
//! (`policy::elastic`), and it is lost with its executor.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_policy::elastic::ObjectKey;
use millrace_policy::ids::RequestKey;
use millrace_proto::executor::ObjectPart;
use millrace_types::{GpuIndex, Incarnation};
use tokio::sync::oneshot;

use crate::actors::node::Reader;
use crate::actors::{gpu, node};
use crate::handle::Directory;
use crate::port::Descriptor;
use crate::seams::Mailbox;

/// Where an object is.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// Being written, in this executor's GPU or to the host.
    Coming,
    /// In the GPU's memory, as this executor mapped it.
    Gpu(Incarnation),
    /// In host memory.
    Host(Descriptor),
    /// Nowhere any more.
    Lost,
}

/// An object that a GPU made.
pub(crate) struct Kept {
    pub(crate) gpu: GpuIndex,
    /// Unique on the node.
    pub(crate) key: ObjectKey,
    pub(crate) bytes: u64,
    state: Mutex<State>,
    home: Mailbox<gpu::Message>,
}

struct State {
    place: Place,
    /// The requests of its node that read it, as the queue knows them, and where that is reached. Bounded
    /// by the node's requests.
    readers: BTreeMap<RequestKey, Arc<Directory>>,
}

/// A part of one, as a tensor's contents.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) object: Arc<Kept>,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// An object is nowhere any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the object was lost with its GPU's executor")]
pub(crate) struct Lost;

/// Bytes of an object in host memory: where, and from which offset on.
pub(crate) type OnHost = Result<(Descriptor, u64), Lost>;

/// Where bytes go that were asked for. Who drops it unused says that they are lost.
pub(crate) struct Reply(Option<To>);

enum To {
    /// Whoever has to hear of it in any case.
    Told(Box<dyn FnOnce(OnHost) + Send>),
    /// Whoever waits, and may give up.
    Awaited(oneshot::Sender<OnHost>),
}

impl Reply {
    pub(crate) fn new(reply: impl FnOnce(OnHost) + Send + 'static) -> Self {
        Self(Some(To::Told(Box::new(reply))))
    }

    fn awaited(answer: oneshot::Sender<OnHost>) -> Self {
        Self(Some(To::Awaited(answer)))
    }

    /// Whether nobody waits for it any more.
    pub(crate) fn is_given_up(&self) -> bool {
        matches!(&self.0, Some(To::Awaited(answer)) if answer.is_closed())
    }

    pub(crate) fn send(mut self, found: OnHost) {
        self.tell(found);
    }

    fn tell(&mut self, found: OnHost) {
        match self.0.take() {
            Some(To::Told(reply)) => reply(found),
            // Whoever asked may have given up.
            Some(To::Awaited(answer)) => answer.send(found).unwrap_or_default(),
            None => {}
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.tell(Err(Lost));
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

impl Kept {
    /// One that is being written.
    pub(crate) fn new(gpu: GpuIndex, key: ObjectKey, bytes: u64, home: Mailbox<gpu::Message>) -> Self {
        let state = Mutex::new(State { place: Place::Coming, readers: BTreeMap::new() });
        Self { gpu, key, bytes, state, home }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn place(&self) -> Place {
        self.lock().place.clone()
    }

    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.lock().place, Place::Lost)
    }

    /// It is there from now on. Where it came to a GPU's memory or left it, the queue hears of it for each
    /// request that reads it: that may be better served elsewhere.
    pub(crate) fn moves_to(&self, place: Place) {
        let on_gpu = |place: &Place| matches!(place, Place::Gpu(_));
        let mut state = self.lock();
        let moved = on_gpu(&state.place) != on_gpu(&place);
        state.place = place;
        for (reader, directory) in state.readers.iter().filter(|_| moved) {
            directory.post(node::Message::Moved(*reader));
        }
    }

    /// A request reads it, whose node is to hear of it when it moves.
    pub(crate) fn read_by(&self, reader: RequestKey, node: &Arc<Directory>) {
        self.lock().readers.insert(reader, Arc::clone(node));
    }

    /// It does no more.
    pub(crate) fn read_no_more(&self, reader: RequestKey) {
        self.lock().readers.remove(&reader);
    }

    /// A request that reads it waits in the queue at this place, or does no more.
    pub(crate) fn queued(&self, place: u64, waits: bool) {
        self.home.post(gpu::Message::Queued { object: self.key, place, waits });
    }

    /// Has bytes of it copied to host memory, unless they are there.
    pub(crate) fn ask(&self, offset: u64, bytes: u64, reader: Reader, reply: Reply) {
        match self.place() {
            Place::Host(fd) => reply.send(Ok((fd, offset))),
            Place::Lost => reply.send(Err(Lost)),
            Place::Coming | Place::Gpu(_) => {
                let part = ObjectPart { object: self.key.0, offset, bytes };
                self.home.post(gpu::Message::Fetch { part, reader, reply });
            }
        }
    }
}

impl Part {
    /// Its bytes in host memory: where they are, and from which offset on.
    pub(crate) async fn on_host(&self, reader: Reader) -> OnHost {
        let (answer, answered) = oneshot::channel();
        self.object.ask(self.offset, self.bytes, reader, Reply::awaited(answer));
        answered.await.unwrap_or(Err(Lost))
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, key, bytes, .. } = self;
        f.debug_struct("Kept")
            .field("gpu", gpu)
            .field("key", key)
            .field("bytes", bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.home.post(gpu::Message::Discard(self.key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seams::heard;

    #[test]
    fn the_queue_hears_for_each_reader_when_it_comes_to_a_gpu_or_leaves_it() {
        actix::System::new().block_on(async {
            let ((queue, mut told), (home, _)) = (heard::<node::Message>(), heard());
            let directory = Directory::new();
            directory.publish_node(Some(queue));
            let kept = Kept::new(GpuIndex(0), ObjectKey(7), 9, home);
            kept.read_by(RequestKey(1), &directory);
            kept.moves_to(Place::Gpu(Incarnation(1)));
            kept.moves_to(Place::Gpu(Incarnation(1)));
            kept.read_by(RequestKey(2), &directory);
            kept.read_no_more(RequestKey(1));
            kept.moves_to(Place::Lost);
            directory.post(node::Message::Withdraw(RequestKey(3)));
            let mut moved = Vec::new();
            while let Some(node::Message::Moved(key)) = told.recv().await {
                moved.push(key);
            }
            assert_eq!(moved, [RequestKey(1), RequestKey(2)]);
        });
    }
}
