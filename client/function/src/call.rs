//! One call: its inputs, the data it fetches and stores, and its answer.

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
use crate::memory::{Buffer, Data, Room};
use crate::session::{Arrived, Shared};

/// The longest message of a failure; the rest of a longer one is left out.
const MESSAGE_BYTES_MAX: usize = 4 << 10;

/// An input of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Its name, as the manifest declares it.
    pub name: String,
    /// Its element type.
    pub datatype: DataType,
    /// Its shape, every dimension a number.
    pub shape: Vec<i64>,
    /// What its data is fetched by.
    pub id: DataId,
}

/// A call. Its methods may be used from any thread.
#[derive(Debug)]
pub struct Call {
    shared: Arc<Shared>,
    number: u64,
    request_id: String,
    timeout: Duration,
    wanted: Vec<String>,
    inputs: Vec<Input>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    data: HashMap<DataId, Held>,
    outputs: Vec<Output>,
    answered: bool,
}

/// Data that this process has at hand.
#[derive(Debug)]
struct Held {
    data: Data,
    /// The worker has it as an object too.
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
    pub(crate) fn new(shared: Arc<Shared>, call: wire::Call, mut with: Arrived) -> Result<Self, Error> {
        let wire::Call { call: number, request_id, inputs: tensors, outputs: wanted, timeout_ns } = call;
        let mut state = State::default();
        let mut inputs = Vec::with_capacity(tensors.len());
        for wire::Tensor { name, datatype, shape, contents, bytes, .. } in tensors {
            let data = match contents {
                Some(tensor::Contents::Inline(data)) => Data::arrived(&data),
                Some(tensor::Contents::ContentsFd(place)) => memory(with.take(place)?, bytes)?,
                _ => return Err(Error::Protocol("an input without contents")),
            };
            let datatype = datatype.parse().map_err(|_| Error::Protocol("an input of an unknown type"))?;
            // Whatever it is elsewhere, here it goes by a name of its own.
            let id = shared.unique_id(number)?;
            state.data.insert(id.clone(), Held { data, kept: false });
            inputs.push(Input { name, datatype, shape, id });
        }
        let (timeout, state) = (Duration::from_nanos(timeout_ns), Mutex::new(state));
        Ok(Self { shared, number, request_id, timeout, wanted, inputs, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Never left half-changed: a poisoned one is still good.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody waits for an answered one: what it asked might be answered with the next call.
    fn still_open(&self) -> Result<(), Error> {
        if self.state().answered { Err(Error::Answered) } else { Ok(()) }
    }

    /// The cluster's name for the request.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// What was left of the request's time when the call came. A process that takes longer is killed.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The outputs that are wanted; none: all that are declared. More may be given.
    #[must_use]
    pub fn wanted(&self) -> &[String] {
        &self.wanted
    }

    /// The inputs, as they came.
    #[must_use]
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// An input by its name.
    ///
    /// # Errors
    /// [`Error::NoInput`].
    pub fn input(&self, name: &str) -> Result<&Input, Error> {
        let input = self.inputs.iter().find(|input| input.name == name);
        input.ok_or_else(|| Error::NoInput(name.to_owned()))
    }

    /// A name for data that nothing else in the cluster has, or will have (D02).
    ///
    /// # Errors
    /// [`Error::NoIds`] before any controller has named this worker, [`Error::Answered`].
    pub fn unique_id(&self) -> Result<DataId, Error> {
        self.still_open()?;
        self.shared.unique_id(self.number)
    }

    /// Data by its name: an input's, what this call stored, or an object of any worker (D04). What is on
    /// this worker is not copied, and nothing is mapped before it is looked at.
    ///
    /// # Errors
    /// [`Error::DataLost`] where no worker has it, [`Error::Unavailable`] where one that may have it
    /// cannot be reached, at the latest when three quarters of what is left of the call's time are
    /// over; [`Error::Answered`].
    pub fn fetch(&self, id: &DataId) -> Result<Buffer, Error> {
        self.still_open()?;
        if let Some(held) = self.state().data.get(id) {
            return held.data.share().map(Buffer::new);
        }
        let fetch = wire::Fetch { id: Some(ids::write(id)) };
        let mut arrived = self.shared.ask(self.number, Said::Fetch(fetch), Vec::new())?;
        let Heard::Fetched(fetched) = &mut arrived.message else {
            return Err(Error::Protocol("another answer than data"));
        };
        let refused = fetched.refused();
        let wire::Fetched { contents, bytes, message, .. } = std::mem::take(fetched);
        let data = match contents {
            None if refused == NotFetched::Unavailable => {
                return Err(Error::Unavailable { id: id.clone(), message });
            }
            None => return Err(Error::DataLost { id: id.clone(), message }),
            Some(fetched::Contents::Inline(data)) => Data::arrived(&data),
            Some(fetched::Contents::ContentsFd(place)) => memory(arrived.take(place)?, bytes)?,
        };
        Ok(Buffer::new(data))
    }

    /// Room for data of so many bytes, all zeros, to be written in place and then stored.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn create(&self, bytes: usize) -> Result<Room, Error> {
        Room::new(bytes)
    }

    /// Stores data under a name that [`Self::unique_id`] gave this process: it is an object of this
    /// worker, in the memory it was written to (D03). Where the worker has no room for it, it stays with
    /// this process until the call is over, and its outputs still name it.
    ///
    /// # Errors
    /// [`Error::Taken`] for a name used before, in whichever call; [`Error::Answered`].
    pub fn store(&self, id: &DataId, room: Room) -> Result<(), Error> {
        self.still_open()?;
        let data = room.seal()?;
        if self.state().data.contains_key(id) {
            return Err(Error::Taken(id.clone()));
        }
        let (contents, descriptors) = match data.share()? {
            Data::Inline(data) => (store::Contents::Inline(data), Vec::new()),
            Data::Memory { fd, .. } => (store::Contents::ContentsFd(0), vec![fd]),
        };
        let bytes = data.len() as u64;
        let store = wire::Store { id: Some(ids::write(id)), contents: Some(contents), bytes };
        let arrived = self.shared.ask(self.number, Said::Store(store), descriptors)?;
        let Heard::Stored(stored) = arrived.message else {
            return Err(Error::Protocol("another answer than of a store"));
        };
        let kept = match stored.refused() {
            NotStored::Unspecified => true,
            NotStored::NoRoom => false,
            NotStored::Over => {
                self.shared.distrust_ids();
                false
            }
            NotStored::Taken => return Err(Error::Taken(id.clone())),
        };
        self.state().data.insert(id.clone(), Held { data, kept });
        Ok(())
    }

    /// Says that an output is this data. It goes to whatever takes it next.
    ///
    /// # Errors
    /// [`Error::Twice`] for an output that was given.
    pub fn output(&self, name: &str, id: &DataId, datatype: DataType, shape: &[i64]) -> Result<(), Error> {
        self.give(name, id, datatype, shape, false)
    }

    /// The same of an output that is for the caller of the workflow: its bytes are in the answer.
    ///
    /// # Errors
    /// As [`Self::output`].
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
            return Err(Error::Twice(name.to_owned()));
        }
        let (name, id, shape) = (name.to_owned(), id.clone(), shape.to_vec());
        state.outputs.push(Output { name, id, datatype, shape, response });
        Ok(())
    }

    /// Answers with the outputs given.
    ///
    /// # Errors
    /// [`Error::Answered`], or the socket's.
    pub fn finish(&self) -> Result<(), Error> {
        let mut state = self.state();
        if state.answered {
            return Err(Error::Answered);
        }
        let (mut outputs, mut descriptors) = (Vec::new(), Vec::new());
        for Output { name, id, datatype, shape, response } in std::mem::take(&mut state.outputs) {
            let (contents, bytes) = match state.data.get(&id) {
                // Small data travels: the answer is on its way in any case.
                Some(Held { data: Data::Inline(data), kept: false }) => {
                    (tensor::Contents::Inline(data.clone()), data.len())
                }
                Some(Held { data, kept: false }) => {
                    let Data::Memory { fd, len } = data.share()? else { continue };
                    (contents_fd(&mut descriptors, fd)?, len)
                }
                Some(Held { data, kept: true }) => (tensor::Contents::Object(ids::write(&id)), data.len()),
                None => (tensor::Contents::Object(ids::write(&id)), 0),
            };
            let (datatype, bytes) = (datatype.to_string(), bytes as u64);
            outputs.push(wire::Tensor { name, datatype, shape, contents: Some(contents), bytes, response });
        }
        state.answered = true;
        self.shared.answer(Said::Return(wire::Return { call: self.number, outputs }), descriptors)
    }

    /// Answers that it cannot be done, and why.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn fail(&self, message: &str) -> Result<(), Error> {
        if std::mem::replace(&mut self.state().answered, true) {
            return Err(Error::Answered);
        }
        let end = message.floor_char_boundary(MESSAGE_BYTES_MAX);
        let fail = wire::Fail { call: self.number, message: message[..end].to_owned() };
        self.shared.answer(Said::Fail(fail), Vec::new())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.state().answered {
            // Where nobody hears it, the worker is gone and the caller with it.
            drop(self.fail("the function gave no answer"));
        }
    }
}

fn memory(fd: OwnedFd, bytes: u64) -> Result<Data, Error> {
    let len = usize::try_from(bytes).map_err(|_| Error::Protocol("more bytes than there are addresses"))?;
    Ok(Data::Memory { fd, len })
}

fn contents_fd(descriptors: &mut Vec<OwnedFd>, fd: OwnedFd) -> Result<tensor::Contents, Error> {
    let place = descriptors.len();
    if place == DESCRIPTORS_MAX {
        let message = format!("more than {DESCRIPTORS_MAX} large outputs that there was no room to store");
        return Err(Error::Function(message));
    }
    descriptors.push(fd);
    // Below DESCRIPTORS_MAX.
    Ok(tensor::Contents::ContentsFd(place as u32))
}
