//! Requests of functions that keep state. Such a request waits for its turn in its sequence, runs
//! on the sequence's state, and replaces the state. Its other inputs and outputs were checked
//! before ([`super`]).

use millrace_proto::{convert, worker as wire};
use millrace_types::{Failure, Reason, RevisionKey};

use super::WorkerService;
use super::running::timeout_of;
use crate::signature::{FunctionSignature, FunctionState};

impl WorkerService {
    /// Runs a request in its turn. The request takes effect on its sequence if and only if it is
    /// answered. A failure leaves the state as it was, unless the state itself is lost.
    pub(super) async fn run_in_sequence(
        &self,
        mut request: wire::InvokeRequest,
        revision: RevisionKey,
        signature: &FunctionSignature,
        state: &FunctionState,
    ) -> Result<wire::InvokeResponse, Failure> {
        // Objects as inputs are refused too: a lost object is reported in a response, and a
        // response takes effect on the sequence.
        if request.hold.is_some() || request.inputs.iter().any(names_object) {
            return Err(Failure::malformed(format!(
                "{revision} keeps state and cannot be a step of a workflow: call it directly"
            )));
        }
        let place = request.sequence.take().ok_or_else(|| {
            Failure::malformed(format!(
                "{revision} keeps state between the requests of a sequence: send the parameter sequence_id, \
                 a number from 1 or a text, and sequence_start with the first request"
            ))
        })?;
        let place = convert::in_sequence(place)?;
        let timeout = timeout_of(&request)?;
        let mut turn = self.sequences.turn(&revision, state, place, timeout).await?;
        let waited = turn.waited();
        request.timeout = Some(convert::duration_wire(timeout.saturating_sub(waited)));
        if !request.outputs.is_empty() {
            request.outputs.extend(turn.outputs());
        } else if turn.ends() {
            // Requests all outputs except the state, which no later request reads.
            request.outputs.extend(signature.outputs.iter().map(|output| output.name.clone()));
        }
        let ran = self.run_on(request, revision, signature, Some(&mut turn)).await;
        match ran {
            Ok(response) => {
                turn.succeed()?;
                Ok(response)
            }
            Err(Failure { reason: Reason::DataLost, may_have_executed, .. }) => {
                Err(Failure { may_have_executed, ..turn.unread() })
            }
            Err(failure) => Err(failure),
        }
    }
}

fn names_object(input: &wire::InferTensor) -> bool {
    input.parts.iter().any(|part| matches!(part.part, Some(wire::tensor_part::Part::Held(_))))
}
