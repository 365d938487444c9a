//! The data that a process names, stores and fetches (D02–D04), served from this worker's objects.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_proto::function as wire;
use millrace_proto::function::{NotFetched, NotStored, fetched, store, tensor};
use millrace_types::{DataId, Timestamp};

use super::copies::CopyPermits;
use super::names::{AssignedNames, IDS_PER_BLOCK, NameState};
use super::outputs::{data_id, memory};
use crate::object_handle::{TransferReader, TransferRequester};
use crate::objects::{Contents, FetchError, ObjectStore, ProgramInput, StoreError};

/// The time to live of stored data, unless the receiver of the output holds the data longer.
const STORED_FOR: Duration = Duration::from_secs(60);
/// The share of a call's remaining time that a fetch may take, in quarters. The program has the rest of the
/// time to continue without the data, or to fail with a message.
const FETCH_QUARTERS: u32 = 3;

/// A call that was sent to a process.
#[derive(Debug)]
pub(crate) struct ProcessCall {
    /// The time at which the call's timeout ends.
    pub(crate) until: Timestamp,
    /// The request of the call.
    pub(crate) asker: Arc<TransferRequester>,
}

/// The last call that was sent to a process, shared by the sender of calls and the process's watch.
pub(crate) type LastCall = Rc<RefCell<Option<ProcessCall>>>;

/// The data access of a process.
#[derive(Debug)]
pub(crate) struct ProcessData {
    objects: ObjectStore,
    aside: CopyPermits,
    names: RefCell<AssignedNames>,
    call: LastCall,
}

impl ProcessData {
    /// Returns the data access of a new process of a program. `aside` holds the permits of large copies.
    pub(crate) fn new(objects: ObjectStore, aside: CopyPermits, call: LastCall) -> Self {
        Self { objects, aside, names: RefCell::default(), call }
    }

    /// Reserves the next block of names for the process. Returns an empty block if no names can be
    /// reserved.
    pub(crate) fn ids(&self) -> wire::IdBlock {
        let Some((epoch, first)) = self.objects.reserve(IDS_PER_BLOCK) else {
            return wire::IdBlock::default();
        };
        self.names.borrow_mut().give(epoch, first);
        wire::IdBlock { home: self.objects.node().to_string(), epoch: epoch.0, first, count: IDS_PER_BLOCK }
    }

    /// Returns the objects among an answer's outputs that the process stored and that no earlier answer
    /// named. The receiver of an earlier answer may still own its objects.
    pub(crate) fn answered(&self, outputs: &[wire::Tensor]) -> BTreeSet<DataId> {
        let mut names = self.names.borrow_mut();
        let object = |output: &wire::Tensor| match &output.contents {
            Some(tensor::Contents::Object(id)) => data_id(id),
            _ => None,
        };
        let own = |id: &DataId| id.home == *self.objects.node() && names.of(id) == NameState::Used;
        let named: BTreeSet<_> = outputs.iter().filter_map(object).filter(own).collect();
        named.iter().for_each(|id| names.answers(id));
        named
    }

    /// Stores data for the process.
    ///
    /// # Errors
    /// The process broke the protocol: the name was not assigned to the process, or the contents are
    /// missing or invalid.
    pub(crate) async fn store(
        &self,
        store: wire::Store,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<wire::Stored> {
        let own = |id: &DataId| id.home == *self.objects.node();
        let id = store.id.as_ref().and_then(data_id).filter(own);
        let name = id.map(|id| (self.names.borrow().of(&id), id));
        let id = match name {
            None | Some((NameState::NotGiven, _)) => {
                return Err(invalid("the process stored data under a name that was not assigned to it"));
            }
            Some((NameState::Used | NameState::Answered, _)) => {
                return Ok(wire::Stored { refused: NotStored::Taken.into() });
            }
            Some((NameState::Free, id)) => id,
        };
        let contents = match (store.contents, descriptor) {
            (Some(store::Contents::Inline(data)), None) => Contents::Inline(data),
            (Some(store::Contents::ContentsFd(0)), Some(fd)) => {
                let checked = memory(&Arc::new(fd), store.bytes);
                checked.map_err(|error| {
                    invalid(format!("the process stored data that cannot be kept: {error}"))
                })?
            }
            _ => return Err(invalid("the process stored data without contents")),
        };
        let refused = match self.objects.keep_as(id.clone(), contents, STORED_FOR).await {
            Ok(()) => {
                self.names.borrow_mut().uses(&id);
                NotStored::Unspecified
            }
            Err(StoreError::NoRoom) => NotStored::NoRoom,
            Err(StoreError::Taken) => NotStored::Taken,
            Err(StoreError::Over) => NotStored::Over,
        };
        Ok(wire::Stored { refused: refused.into() })
    }

    /// Fetches an object for the process, from this worker or from any other. An object in this worker's
    /// host memory is passed in that memory.
    ///
    /// # Errors
    /// The process broke the protocol: the name is invalid.
    pub(crate) async fn fetch(&self, fetch: &wire::Fetch) -> io::Result<(wire::Fetched, Vec<OwnedFd>)> {
        let id = fetch.id.as_ref().and_then(data_id);
        let id = id.ok_or_else(|| invalid("the process asked for data with an invalid name"))?;
        let now = self.objects.clock().now();
        let (left, by, reader) = match &*self.call.borrow() {
            Some(ProcessCall { until, asker }) => {
                (until.since(now), asker.wanted_by(), TransferReader::Outside(Arc::clone(asker)))
            }
            None => (Duration::ZERO, None, TransferReader::None),
        };
        let found = match self.objects.fetch(&id, left * FETCH_QUARTERS / 4, by).await {
            Ok(contents) => contents,
            Err(error) => return Ok((refusal(&error), Vec::new())),
        };
        let bytes = found.len();
        // An object in a GPU's memory is copied to the host, because a process sees no device.
        let given = match found.on_host(0, bytes, reader).await {
            Ok((contents, offset)) => self.give(contents, offset, bytes).await,
            Err(lost) => {
                let why = lost.to_string();
                return Ok((refusal(&FetchError::Lost { id, why }), Vec::new()));
            }
        };
        // The process is not at fault if this machine lacks memory for a copy, so the fetch is refused
        // and the process lives on.
        given.or_else(|error| {
            let why = error.to_string();
            Ok((refusal(&FetchError::Unavailable { id, why }), Vec::new()))
        })
    }

    async fn give(
        &self,
        contents: Contents,
        offset: u64,
        bytes: u64,
    ) -> io::Result<(wire::Fetched, Vec<OwnedFd>)> {
        let given = if contents.is_given_at_once(offset, bytes) {
            contents.given(offset, bytes)?
        } else {
            self.aside.run(move || contents.given(offset, bytes)).await?
        };
        let (contents, descriptors) = match given {
            ProgramInput::Inline(data) => (fetched::Contents::Inline(data), Vec::new()),
            ProgramInput::Memory(fd) => (fetched::Contents::ContentsFd(0), vec![fd.try_clone()?]),
        };
        Ok((wire::Fetched { bytes, contents: Some(contents), ..wire::Fetched::default() }, descriptors))
    }
}

fn refusal(error: &FetchError) -> wire::Fetched {
    let refused = match error {
        FetchError::Lost { .. } => NotFetched::Lost,
        FetchError::Unavailable { .. } => NotFetched::Unavailable,
    };
    wire::Fetched { refused: refused.into(), message: error.to_string(), ..wire::Fetched::default() }
}

pub(crate) fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use millrace_types::Bytes;

    use super::*;

    #[tokio::test]
    async fn an_object_belongs_to_the_first_answer_that_names_it() {
        let (objects, _told) = ObjectStore::registered(Bytes::mib(1));
        let data = ProcessData::new(objects, CopyPermits::default(), LastCall::default());
        let wire::IdBlock { home, epoch, first: counter, .. } = data.ids();
        let id = wire::DataId { home, epoch, counter };
        let contents = Some(store::Contents::Inline(bytes::Bytes::from_static(b"abcd")));
        let stored = wire::Store { id: Some(id.clone()), contents, bytes: 4 };
        assert_eq!(data.store(stored.clone(), None).await.unwrap(), wire::Stored::default());
        let contents = Some(tensor::Contents::Object(id));
        let outputs = [wire::Tensor { contents, ..wire::Tensor::default() }];
        assert_eq!(data.answered(&outputs).len(), 1);
        assert!(data.answered(&outputs).is_empty(), "the object belongs to the first answer");
        let again = data.store(stored, None).await.unwrap();
        assert_eq!(again.refused(), NotStored::Taken);
    }

    #[tokio::test]
    async fn a_large_copy_waits_for_its_turn_but_small_and_sealed_data_does_not() {
        let (objects, _told) = ObjectStore::registered(Bytes::mib(4));
        let aside = CopyPermits::default();
        let minute = Duration::from_secs(60);
        let data = ProcessData::new(objects.clone(), aside.clone(), LastCall::default());
        let fetch = |id: DataId| wire::Fetch {
            id: Some(wire::DataId { home: id.home.to_string(), epoch: id.epoch.0, counter: id.counter }),
        };
        let inline = |bytes: usize| Contents::Inline(vec![7u8; bytes].into());
        let small = fetch(objects.keep(inline(3), minute).await.unwrap());
        let large = fetch(objects.keep(inline(1 << 20), minute).await.unwrap());
        // The memory of a fetched object is sealed, so storing that memory again needs no copy.
        let (_, mut fds) = data.fetch(&large).await.unwrap();
        let lies = Contents::Memory { fd: Arc::new(fds.remove(0)), bytes: 1 << 20 };
        let lies = fetch(objects.keep(lies, minute).await.unwrap());
        let turns = aside.take_all().await;
        for (at_once, inline) in [(&small, true), (&lies, false)] {
            let (fetched, fds) = data.fetch(at_once).now_or_never().unwrap().unwrap();
            assert_eq!((fetched.contents.is_some(), fds.is_empty()), (true, inline));
        }
        let mut waits = Box::pin(data.fetch(&large));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(turns);
        let (fetched, fds) = waits.await.unwrap();
        assert_eq!((fetched.bytes, fds.len()), (1 << 20, 1));
    }
}
