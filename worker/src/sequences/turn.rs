//! A request's turn in its sequence: the state that it reads until the turn is over, and the state
//! that it writes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_core::ids::StateId;
use millrace_scheduling::sequences::Event;
use millrace_types::sequences::StateTensor;
use millrace_types::{Failure, Reason, SequenceId, Timestamp};

use super::manager::{ArrivedRequest, SequenceManager};
use super::table::{SequenceState, TurnGrant};
use crate::objects::{Contents, INLINE_BYTES_MAX, InputTensor, ObjectReservation, memory};
use crate::tensors::UnpackError;

/// A request's ticket in its sequence. Dropping the ticket cancels the request. State that it wrote
/// is discarded unless the request succeeded before.
pub(super) struct SequenceTicket {
    pub(super) sequences: SequenceManager,
    pub(super) request: ArrivedRequest,
}

impl SequenceTicket {
    fn tell(&self, event: Event) {
        self.sequences.change(&self.request, |table, now| table.tell(now, event));
    }
}

impl Drop for SequenceTicket {
    fn drop(&mut self) {
        self.tell(Event::Failed { key: self.request.key });
    }
}

/// A request that may run. Dropping the turn leaves the state unchanged.
pub(crate) struct SequenceTurn {
    /// Reservation for the written state; `None` if the request ends its sequence and writes none.
    /// Declared, and thus dropped, before the place, because that lets the next request reserve
    /// memory.
    claim: Option<ObjectReservation>,
    place: SequenceTicket,
    id: SequenceId,
    came: Timestamp,
    waited: Duration,
    tensors: Arc<[StateTensor]>,
    /// State that the request reads, in the order of `tensors`.
    reads: Vec<Contents>,
    made: Vec<Option<Contents>>,
    writes: StateId,
}

impl SequenceTurn {
    pub(super) fn new(
        place: SequenceTicket,
        id: SequenceId,
        came: Timestamp,
        waited: Duration,
        TurnGrant { reads, writes }: TurnGrant,
        tensors: Arc<[StateTensor]>,
        claim: Option<ObjectReservation>,
    ) -> Result<Self, Failure> {
        let reads = match reads {
            Some(reads) => reads,
            None => tensors.iter().map(|tensor| zeros(tensor.bytes)).collect::<io::Result<_>>().map_err(
                |error| {
                    let message = format!("no memory for the state ({error}): try again soon");
                    Failure::new(Reason::QueueFull, message)
                },
            )?,
        };
        let made = vec![None; tensors.len()];
        Ok(Self { claim, place, id, came, waited, tensors, reads, made, writes })
    }

    /// Returns the state as inputs of the run.
    pub(crate) fn inputs(&self) -> Vec<InputTensor> {
        let input = |(StateTensor { input, .. }, contents): (&StateTensor, &Contents)| InputTensor {
            name: input.name.clone(),
            datatype: input.datatype.to_string(),
            shape: input.wire_shape(),
            contents: contents.clone(),
        };
        self.tensors.iter().zip(&self.reads).map(input).collect()
    }

    /// Returns the time of the request's arrival on this worker.
    pub(crate) fn came(&self) -> Timestamp {
        self.came
    }

    /// Returns the time that the request waited behind earlier requests of its sequence.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Whether the request ends its sequence, so that no later request reads its state.
    pub(crate) fn ends(&self) -> bool {
        self.claim.is_none()
    }

    /// Returns the outputs that are stored as state and left out of the answer.
    pub(crate) fn outputs(&self) -> Vec<String> {
        if self.ends() {
            return Vec::new();
        }
        self.tensors.iter().map(|tensor| tensor.output.clone()).collect()
    }

    /// Takes an output of the run if it is state; returns any other output.
    ///
    /// # Errors
    /// [`UnpackError::Lost`] if the output was lost with its GPU's executor.
    pub(crate) fn take(&mut self, output: InputTensor) -> Result<Option<InputTensor>, UnpackError> {
        let Some(place) = self.tensors.iter().position(|tensor| tensor.output == output.name) else {
            return Ok(Some(output));
        };
        if output.contents.is_lost() {
            return Err(UnpackError::Lost(output.name));
        }
        self.made[place] = Some(match output.contents {
            // The data may be a slice of a whole message, so the data is copied.
            Contents::Inline(data) => Contents::Inline(Bytes::copy_from_slice(&data)),
            contents => contents,
        });
        Ok(None)
    }

    /// Ends the turn of an answered request. The next request reads the state that this request
    /// wrote.
    ///
    /// # Errors
    /// [`Reason::Internal`] if the run did not give all of its state.
    pub(crate) fn succeed(self) -> Result<(), Failure> {
        let Self { place, tensors, made, writes, claim, .. } = self;
        let given = made.into_iter().zip(tensors.iter()).map(|(made, tensor)| {
            made.ok_or_else(|| {
                let message = format!("the executor's answer lacks the state output {:?}", tensor.output);
                Failure::new(Reason::Internal, message).after_execution()
            })
        });
        let wrote = match claim {
            Some(claim) => Some((writes, SequenceState { tensors: given.collect::<Result<_, _>>()?, claim })),
            None => None,
        };
        place.sequences.change(&place.request, |table, now| table.succeeded(now, place.request.key, wrote));
        Ok(())
    }

    /// Ends the turn of a request that could not read its state, and returns the failure. If the
    /// state is lost, the sequence ends. If only a copy failed, the state stays for the next
    /// request.
    pub(crate) fn unread(self) -> Failure {
        if self.reads.iter().any(Contents::is_lost) {
            return self.lost();
        }
        let message = format!(
            "the state of sequence {} could not be copied to its reader and is unchanged: try again",
            self.id
        );
        Failure::new(Reason::AttemptsExhausted, message)
    }

    /// Ends the sequence because its state is lost.
    pub(super) fn lost(self) -> Failure {
        let Self { claim, place, id, .. } = self;
        drop(claim);
        place.tell(Event::Lost { key: place.request.key });
        lost(&id)
    }
}

/// Returns zeros of this size, as an input of a run.
fn zeros(bytes: usize) -> io::Result<Contents> {
    if bytes <= INLINE_BYTES_MAX {
        return Ok(Contents::Inline(vec![0; bytes].into()));
    }
    // Unwritten pages of the file take no memory until they are read.
    let file = memory("millrace-state")?;
    file.set_len(bytes as u64)?;
    Ok(Contents::Memory { fd: Arc::new(file.into()), bytes: bytes as u64 })
}

/// Returns the failure for a client that has to start its sequence again.
pub(super) fn lost(id: &SequenceId) -> Failure {
    let message = format!(
        "the state of sequence {id} was lost with its executor or GPU: start it again with sequence_start"
    );
    Failure::new(Reason::SequenceNotFound, message)
}
