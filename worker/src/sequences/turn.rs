//! A request's turn in its sequence: the state that it reads, until it is over, and what it writes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_policy::ids::{RequestKey, StateId};
use millrace_policy::sequences::Event;
use millrace_types::sequences::StateTensor;
use millrace_types::{Failure, Reason, RevisionKey, SequenceId, Timestamp};

use super::table::{Given, Held};
use super::{Sequences, lost};
use crate::objects::{Claim, Contents, memory};
use crate::service::tensors::{INLINE_BYTES_MAX, Input, UnpackError};

/// A request's place among those of its function. Once it is dropped nobody waits for the request, and
/// nothing of what it wrote is held that was not said to be before.
pub(super) struct Place {
    pub(super) sequences: Sequences,
    pub(super) revision: RevisionKey,
    /// Of which of its tables.
    pub(super) first: RequestKey,
    pub(super) key: RequestKey,
}

impl Place {
    fn tell(&self, event: Event) {
        self.sequences.change(self, |table, now| table.tell(now, event));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.tell(Event::Failed { key: self.key });
    }
}

/// A request that may run. Dropped, it leaves the state as it was.
pub(crate) struct Turn {
    /// The room of what it writes; `None`: it ends its sequence, and leaves nothing. Goes before its place,
    /// which lets the next one take room.
    claim: Option<Claim>,
    place: Place,
    id: SequenceId,
    came: Timestamp,
    waited: Duration,
    tensors: Arc<[StateTensor]>,
    /// By the tensors' order, as are those made.
    reads: Vec<Contents>,
    made: Vec<Option<Contents>>,
    writes: StateId,
}

impl Turn {
    pub(super) fn new(
        (place, id): (Place, SequenceId),
        (came, waited): (Timestamp, Duration),
        Given { reads, writes }: Given,
        tensors: Arc<[StateTensor]>,
        claim: Option<Claim>,
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

    /// The state, as inputs of the run.
    pub(crate) fn inputs(&self) -> Vec<Input> {
        let input = |(StateTensor { input, .. }, contents): (&StateTensor, &Contents)| Input {
            name: input.name.clone(),
            datatype: input.datatype.to_string(),
            shape: input.wire_shape(),
            contents: contents.clone(),
        };
        self.tensors.iter().zip(&self.reads).map(input).collect()
    }

    /// When the request came here.
    pub(crate) fn came(&self) -> Timestamp {
        self.came
    }

    /// How long it has waited behind others of its sequence.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Whether it ends its sequence: nobody reads what it would write.
    pub(crate) fn ends(&self) -> bool {
        self.claim.is_none()
    }

    /// The outputs that are kept as state, and no part of the answer.
    pub(crate) fn outputs(&self) -> Vec<String> {
        if self.ends() {
            return Vec::new();
        }
        self.tensors.iter().map(|tensor| tensor.output.clone()).collect()
    }

    /// Keeps an output of the run that is state; gives back one that is not.
    ///
    /// # Errors
    /// [`UnpackError::Lost`] where it is gone already, with its GPU's executor.
    pub(crate) fn take(&mut self, output: Input) -> Result<Option<Input>, UnpackError> {
        let Some(place) = self.tensors.iter().position(|tensor| tensor.output == output.name) else {
            return Ok(Some(output));
        };
        if output.contents.is_lost() {
            return Err(UnpackError::Lost(output.name));
        }
        self.made[place] = Some(match output.contents {
            // It may be a part of a whole message.
            Contents::Inline(data) => Contents::Inline(Bytes::copy_from_slice(&data)),
            contents => contents,
        });
        Ok(None)
    }

    /// The request has its answer, and what it wrote is what the next one reads, where there is one.
    ///
    /// # Errors
    /// [`Reason::Internal`] where the run did not give all of its state.
    pub(crate) fn succeed(self) -> Result<(), Failure> {
        let Self { place, tensors, made, writes, claim, .. } = self;
        let given = made.into_iter().zip(tensors.iter()).map(|(made, tensor)| {
            made.ok_or_else(|| {
                let message = format!("the executor's answer has no {:?}, which is state", tensor.output);
                Failure::new(Reason::Internal, message).after_execution()
            })
        });
        let wrote = match claim {
            Some(claim) => Some((writes, Held { tensors: given.collect::<Result<_, _>>()?, claim })),
            None => None,
        };
        place.sequences.change(&place, |table, now| table.succeeded(now, place.key, wrote));
        Ok(())
    }

    /// What it reads could not be had: what the client is told. Where it is nowhere any more, the sequence is
    /// over; where it could only not be copied to where it was to be read, the next one finds it as it was.
    pub(crate) fn unread(self) -> Failure {
        if self.reads.iter().any(Contents::is_lost) {
            return self.lost();
        }
        let message = format!(
            "the state of sequence {} could not be brought to where it is read, and is as it was: try again",
            self.id
        );
        Failure::new(Reason::AttemptsExhausted, message)
    }

    /// Ends the sequence, whose state is nowhere any more.
    pub(super) fn lost(self) -> Failure {
        let Self { claim, place, id, .. } = self;
        drop(claim);
        place.tell(Event::Lost { key: place.key });
        lost(&id)
    }
}

/// So many bytes, as a run takes them.
fn zeros(bytes: usize) -> io::Result<Contents> {
    if bytes <= INLINE_BYTES_MAX {
        return Ok(Contents::Inline(vec![0; bytes].into()));
    }
    // Without a page of its own until somebody reads it.
    let file = memory("millrace-state")?;
    file.set_len(bytes as u64)?;
    Ok(Contents::Memory { fd: Arc::new(file.into()), bytes: bytes as u64 })
}
