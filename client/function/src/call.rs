//! A call: its inputs, the data that it fetches and stores, and its response.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_proto::frames::DESCRIPTORS_MAX;
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::function::to_process::Message as Heard;
use millrace_proto::function::{self as wire, NotFetched, NotStored, fetched, store, tensor};
use millrace_types::{DataId, DataType};

use crate::error::Error;
use crate::ids;
use crate::link::{ReceivedMessage, SessionState};
use crate::memory::{Buffer, DataMemory, Room};

/// The longest failure message, in bytes. A longer message is truncated.
const MESSAGE_BYTES_MAX: usize = 4 << 10;

/// An input of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// The name that the manifest declares.
    pub name: String,
    /// The type of each element.
    pub datatype: DataType,
    /// The size of each dimension. No dimension is variable.
    pub shape: Vec<i64>,
    /// The id under which [`Call::fetch`] returns the input's data.
    pub id: DataId,
}

/// A request that the process serves. The methods may be used from any thread.
#[derive(Debug)]
pub struct Call {
    shared: Arc<SessionState>,
    number: u64,
    request_id: String,
    timeout: Duration,
    wanted: Vec<String>,
    inputs: Vec<Input>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    data: HashMap<DataId, CachedData>,
    outputs: Vec<Output>,
    answered: bool,
}

/// Data that this process can read without asking the worker.
#[derive(Debug)]
struct CachedData {
    data: DataMemory,
    /// Whether the worker has the data as an object too.
    kept: bool,
}

#[derive(Debug)]
struct Output {
    name: String,
    id: DataId,
    datatype: DataType,
    shape: Vec<i64>,
    response: bool,
}

impl Call {
    pub(crate) fn new(
        shared: Arc<SessionState>,
        call: wire::Call,
        mut with: ReceivedMessage,
    ) -> Result<Self, Error> {
        let wire::Call { call: number, request_id, inputs: tensors, outputs: wanted, timeout_ns } = call;
        let mut state = State::default();
        let mut inputs = Vec::with_capacity(tensors.len());
        for wire::Tensor { name, datatype, shape, contents, bytes, .. } in tensors {
            let data = match contents {
                Some(tensor::Contents::Inline(data)) => DataMemory::arrived(&data),
                Some(tensor::Contents::ContentsFd(place)) => memory(with.take(place)?, bytes)?,
                _ => return Err(Error::Protocol("an input without contents")),
            };
            let datatype = datatype.parse().map_err(|_| Error::Protocol("an input of an unknown type"))?;
            // The input may have an id elsewhere in the cluster. The process reads it under an id
            // of its own.
            let id = shared.unique_id(number)?;
            state.data.insert(id.clone(), CachedData { data, kept: false });
            inputs.push(Input { name, datatype, shape, id });
        }
        Ok(Self {
            shared,
            number,
            request_id,
            timeout: Duration::from_nanos(timeout_ns),
            wanted,
            inputs,
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic leaves the state half-changed, so a poisoned state is still valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an error if the call is answered. The worker no longer expects messages of an
    /// answered call, so a reply could belong to the next call.
    fn still_open(&self) -> Result<(), Error> {
        if self.state().answered { Err(Error::AlreadyAnswered) } else { Ok(()) }
    }

    /// Returns the id of the request in the cluster.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Returns the time that the request had left when the call arrived. The worker kills a process
    /// that exceeds the time.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the names of the requested outputs. Empty for all declared outputs. A function may
    /// set further outputs.
    #[must_use]
    pub fn wanted(&self) -> &[String] {
        &self.wanted
    }

    /// Returns the inputs in the order in which they arrived.
    #[must_use]
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// Returns an input by name.
    ///
    /// # Errors
    /// [`Error::NoInput`] when the call has no such input.
    pub fn input(&self, name: &str) -> Result<&Input, Error> {
        let input = self.inputs.iter().find(|input| input.name == name);
        input.ok_or_else(|| Error::NoInput(name.to_owned()))
    }

    /// Returns an id for data that nothing else in the cluster has or will have (D02).
    ///
    /// # Errors
    /// [`Error::NoIds`] before any controller has registered this worker, [`Error::AlreadyAnswered`].
    pub fn unique_id(&self) -> Result<DataId, Error> {
        self.still_open()?;
        self.shared.unique_id(self.number)
    }

    /// Returns the data of an id: an input, data that this call stored, or an object of any worker
    /// (D04). Data on this worker is not copied, and is mapped only when it is first read.
    ///
    /// # Errors
    /// [`Error::DataLost`] when no worker has the data. [`Error::Unavailable`] when a worker that
    /// may have the data cannot be reached, at the latest after three quarters of the call's
    /// remaining time. [`Error::AlreadyAnswered`].
    pub fn fetch(&self, id: &DataId) -> Result<Buffer, Error> {
        self.still_open()?;
        if let Some(held) = self.state().data.get(id) {
            return held.data.share().map(Buffer::new);
        }
        let fetch = wire::Fetch { id: Some(ids::write(id)) };
        let mut arrived = self.shared.ask(self.number, Said::Fetch(fetch), Vec::new())?;
        let Heard::Fetched(fetched) = &mut arrived.message else {
            return Err(Error::Protocol("the reply to a fetch has no data"));
        };
        let refused = fetched.refused();
        let wire::Fetched { contents, bytes, message, .. } = std::mem::take(fetched);
        let data = match contents {
            None if refused == NotFetched::Unavailable => {
                return Err(Error::Unavailable { id: id.clone(), message });
            }
            None => return Err(Error::DataLost { id: id.clone(), message }),
            Some(fetched::Contents::Inline(data)) => DataMemory::arrived(&data),
            Some(fetched::Contents::ContentsFd(place)) => memory(arrived.take(place)?, bytes)?,
        };
        Ok(Buffer::new(data))
    }

    /// Allocates memory for `bytes` bytes, all zeros, to be written in place and then stored.
    ///
    /// # Errors
    /// [`Error::Memory`] when the memory cannot be allocated.
    pub fn create(&self, bytes: usize) -> Result<Room, Error> {
        Room::new(bytes)
    }

    /// Stores data under an id that [`Self::unique_id`] returned. The data becomes an object of
    /// this worker, in the memory in which it was written (D03). If the worker has no room for the
    /// data, this process keeps it until the call is over, and outputs may still name it.
    ///
    /// # Errors
    /// [`Error::IdAlreadyUsed`] for an id that any call used before; [`Error::AlreadyAnswered`].
    pub fn store(&self, id: &DataId, room: Room) -> Result<(), Error> {
        self.still_open()?;
        let data = room.seal()?;
        if self.state().data.contains_key(id) {
            return Err(Error::IdAlreadyUsed(id.clone()));
        }
        let (contents, descriptors) = match data.share()? {
            DataMemory::Inline(data) => (store::Contents::Inline(data), Vec::new()),
            DataMemory::Memory { fd, .. } => (store::Contents::ContentsFd(0), vec![fd]),
        };
        let bytes = data.len() as u64;
        let store = wire::Store { id: Some(ids::write(id)), contents: Some(contents), bytes };
        let arrived = self.shared.ask(self.number, Said::Store(store), descriptors)?;
        let Heard::Stored(stored) = arrived.message else {
            return Err(Error::Protocol("the reply to a store has another type"));
        };
        let kept = match stored.refused() {
            NotStored::Unspecified => true,
            NotStored::NoRoom => false,
            NotStored::Over => {
                self.shared.discard_ids();
                false
            }
            NotStored::Taken => return Err(Error::IdAlreadyUsed(id.clone())),
        };
        self.state().data.insert(id.clone(), CachedData { data, kept });
        Ok(())
    }

    /// Sets an output to stored data. The data passes to the output's next consumer.
    ///
    /// # Errors
    /// [`Error::OutputAlreadySet`] for an output that is already set.
    pub fn output(&self, name: &str, id: &DataId, datatype: DataType, shape: &[i64]) -> Result<(), Error> {
        self.give(name, id, datatype, shape, false)
    }

    /// Sets an output for the caller of the workflow: its bytes are in the response.
    ///
    /// # Errors
    /// The errors of [`Self::output`].
    pub fn response(&self, name: &str, id: &DataId, datatype: DataType, shape: &[i64]) -> Result<(), Error> {
        self.give(name, id, datatype, shape, true)
    }

    fn give(
        &self,
        name: &str,
        id: &DataId,
        datatype: DataType,
        shape: &[i64],
        response: bool,
    ) -> Result<(), Error> {
        let mut state = self.state();
        if state.outputs.iter().any(|output| output.name == name) {
            return Err(Error::OutputAlreadySet(name.to_owned()));
        }
        let name = name.to_owned();
        let shape = shape.to_vec();
        state.outputs.push(Output { name, id: id.clone(), datatype, shape, response });
        Ok(())
    }

    /// Answers the call with the outputs that were set.
    ///
    /// # Errors
    /// [`Error::AlreadyAnswered`], or the error of the socket.
    pub fn finish(&self) -> Result<(), Error> {
        let mut state = self.state();
        if state.answered {
            return Err(Error::AlreadyAnswered);
        }
        let mut outputs = Vec::new();
        let mut descriptors = Vec::new();
        for Output { name, id, datatype, shape, response } in std::mem::take(&mut state.outputs) {
            let (contents, bytes) = match state.data.get(&id) {
                // Small data travels inline, because the response is sent in any case.
                Some(CachedData { data: DataMemory::Inline(data), kept: false }) => {
                    (tensor::Contents::Inline(data.clone()), data.len())
                }
                Some(CachedData { data, kept: false }) => {
                    let DataMemory::Memory { fd, len } = data.share()? else { continue };
                    (contents_fd(&mut descriptors, fd)?, len)
                }
                Some(CachedData { data, kept: true }) => {
                    (tensor::Contents::Object(ids::write(&id)), data.len())
                }
                None => (tensor::Contents::Object(ids::write(&id)), 0),
            };
            outputs.push(wire::Tensor {
                name,
                datatype: datatype.to_string(),
                shape,
                contents: Some(contents),
                bytes: bytes as u64,
                response,
            });
        }
        state.answered = true;
        self.shared.answer(Said::Return(wire::Return { call: self.number, outputs }), descriptors)
    }

    /// Answers the call with an error. A message beyond 4 KiB is truncated.
    ///
    /// # Errors
    /// The errors of [`Self::finish`].
    pub fn fail(&self, message: &str) -> Result<(), Error> {
        if std::mem::replace(&mut self.state().answered, true) {
            return Err(Error::AlreadyAnswered);
        }
        let end = message.floor_char_boundary(MESSAGE_BYTES_MAX);
        let fail = wire::Fail { call: self.number, message: message[..end].to_owned() };
        self.shared.answer(Said::Fail(fail), Vec::new())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.state().answered {
            // If the message cannot be sent, the worker and thus the caller are gone.
            drop(self.fail("the function dropped the call without an answer"));
        }
    }
}

fn memory(fd: OwnedFd, bytes: u64) -> Result<DataMemory, Error> {
    let len =
        usize::try_from(bytes).map_err(|_| Error::Protocol("the data is larger than the address space"))?;
    Ok(DataMemory::Memory { fd, len })
}

fn contents_fd(descriptors: &mut Vec<OwnedFd>, fd: OwnedFd) -> Result<tensor::Contents, Error> {
    let place = descriptors.len();
    if place == DESCRIPTORS_MAX {
        let message = format!(
            "more than {DESCRIPTORS_MAX} large outputs are not stored: the worker had no room for them"
        );
        return Err(Error::Function(message));
    }
    descriptors.push(fd);
    // `place` is below DESCRIPTORS_MAX, so it fits.
    Ok(tensor::Contents::ContentsFd(place as u32))
}
