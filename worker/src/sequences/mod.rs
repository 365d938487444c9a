//! The state of functions that keep state from one request of a sequence to the next (T11). The core
//! ([`millrace_scheduling::sequences`]) decides about turns; this module stores the state.
//!
//! ```text
//! request ─► turn: waits for earlier requests ─► state goes in as inputs ─► run ─► state outputs are
//!                                                                                  stored for the next
//! ```
//! State is stored in the form of the run's output, and goes in as any other input. Large state is
//! an object in the memory of the GPU that made it, in the elastic store that also has the
//! intermediate data of workflows. The next run there reads it in place, and dispatch knows its
//! GPU. If models or other objects need the memory, state is written back to the host, as a region
//! that is marked mutable; models are never copied back (T10). Smaller state travels in the
//! messages of answers and requests, as every tensor of that size. State has no object name, no
//! expiry, and no entry in the index. State is dropped with its last handle, which is here or with
//! a request.
//!
//! State on a GPU is lost with its executor, and so are its sequences: the next request of such a
//! sequence is told to start again. A function that moves to another worker has no sequences there.
//! A worker that was declared lost drops its sequences when it returns, because other sequences may
//! have used the names meanwhile.
//!
//! Requests on any thread share the tables under a lock. The lock is held while the core decides and
//! never across an await. The core bounds the sequences, and object memory bounds their state: each
//! stored or expected state reserves its size. A request that ends its sequence expects none.

mod manager;
mod table;
#[cfg(test)]
mod tests;
mod turn;

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::trace::{self, FinishedSpan};
use millrace_scheduling::sequences::SequenceRefusal;
use millrace_types::{Bytes, Failure, InSequence, Reason, RevisionKey, SequenceId};
use tracing::Span;

pub(crate) use self::manager::{SequenceManager, SequenceTally};
pub(crate) use self::turn::SequenceTurn;

use self::turn::{SequenceTicket, lost};
use crate::objects::ObjectReservation;
use crate::signature::FunctionState;

impl SequenceManager {
    /// Waits for a request's turn in its sequence, at most for `timeout`.
    ///
    /// # Errors
    /// [`Reason::SequenceNotFound`] if the sequence does not exist and the request starts none;
    /// [`Reason::QueueFull`] beyond a bound, which the message names; [`Reason::TimedOut`];
    /// [`Reason::FunctionNotReady`] if the function leaves this worker.
    pub(crate) async fn turn(
        &self,
        revision: &RevisionKey,
        state: &FunctionState,
        asked: InSequence,
        timeout: Duration,
    ) -> Result<SequenceTurn, Failure> {
        let id = asked.id.clone();
        let ends = asked.end;
        let came = self.0.clock.now();
        let (request, turn) = self.arrive(revision, state, asked);
        let place = SequenceTicket { sequences: self.clone(), request };
        let given = tokio::time::timeout(self.0.clock.sleep_for(timeout), turn).await;
        let waited = self.0.clock.now().since(came);
        trace::record_finished(
            &Span::current(),
            "turn",
            FinishedSpan { ago: Duration::ZERO, took: waited },
            Vec::new,
        );
        let given = match given {
            Ok(Ok(Ok(given))) => given,
            Ok(Ok(Err(why))) => return Err(refused(why, revision, &id, state)),
            // The table was dropped because its function left this worker.
            Ok(Err(_gone)) => {
                let message = format!("{revision} is leaving this worker: ask another worker");
                return Err(Failure::new(Reason::FunctionNotReady, message));
            }
            Err(_elapsed) => {
                let message = format!(
                    "earlier requests of sequence {id} did not end within {timeout:?}: allow more time"
                );
                return Err(Failure::new(Reason::TimedOut, message));
            }
        };
        // A request that ends its sequence leaves no state, so the request runs even if memory is
        // full, and frees memory.
        let claim = if ends { None } else { Some(self.claim(revision, state)?) };
        SequenceTurn::new(place, id, came, waited, given, Arc::clone(&state.tensors), claim)
    }
    /// Reserves memory for another state.
    fn claim(&self, revision: &RevisionKey, state: &FunctionState) -> Result<ObjectReservation, Failure> {
        let bytes = Bytes(state.tensors.iter().map(|tensor| tensor.bytes as u64).sum());
        self.0.objects.claim(bytes, state.tensors.len() as u64).ok_or_else(|| {
            let message = format!(
                "the worker's object memory has no room for {bytes} of state of {revision}: \
                 end sequences, or start the worker with more --object-memory"
            );
            Failure::new(Reason::QueueFull, message)
        })
    }
}

fn refused(why: SequenceRefusal, revision: &RevisionKey, id: &SequenceId, state: &FunctionState) -> Failure {
    match why {
        SequenceRefusal::Lost => lost(id),
        SequenceRefusal::Unknown => {
            let message = format!(
                "{revision} has no sequence {id} on this worker: it never began, ended, was idle for {:?}, or \
                 lost its state when the function moved to another worker or revision; start it again with \
                 sequence_start",
                state.idle
            );
            Failure::new(Reason::SequenceNotFound, message)
        }
        SequenceRefusal::TableFull => {
            let message = format!(
                "{revision} has reached its limit of {} sequences (sequences.max): end some with \
                 sequence_end, or wait until one was idle for {:?}",
                state.max, state.idle
            );
            Failure::new(Reason::QueueFull, message)
        }
        SequenceRefusal::QueueFull => {
            let message = format!(
                "{} requests of sequence {id} of {revision} wait already: send the next when one is answered",
                millrace_scheduling::sequences::WAITING_MAX
            );
            Failure::new(Reason::QueueFull, message)
        }
    }
}
