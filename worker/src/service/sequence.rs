//! A request of a function that keeps state: it waits for its turn in its sequence, runs on that's state,
//! and leaves it another. What it takes and gives besides was checked before ([`super`]).

use millrace_proto::{convert, worker as wire};
use millrace_types::{Failure, Reason, RevisionKey};

use super::WorkerService;
use super::running::timeout_of;
use crate::host_tier::{Signature, State};

impl WorkerService {
    /// Runs a request in its turn. It takes effect on its sequence if and only if it is answered: any
    /// failure leaves the state as it was, but for what is lost.
    pub(super) async fn run_in_sequence(
        &self,
        mut request: wire::InvokeRequest,
        revision: RevisionKey,
        signature: &Signature,
        state: &State,
    ) -> Result<wire::InvokeResponse, Failure> {
        // Nor could it be told of an object that is lost: that is answered, and an answer takes effect.
        if request.hold.is_some() || request.inputs.iter().any(names_object) {
            return Err(Failure::malformed(format!("{revision} keeps state, and is no step of a workflow")));
        }
        let place = request.sequence.take().ok_or_else(|| {
            Failure::malformed(format!(
                "{revision} keeps state from one request of a sequence to the next: send the parameter sequence_id, \
                 a number from 1 or a text, and with the first of a sequence sequence_start"
            ))
        })?;
        let (place, timeout) = (convert::in_sequence(place)?, timeout_of(&request)?);
        let mut turn = self.sequences.turn(&revision, state, place, timeout).await?;
        let waited = turn.waited();
        request.timeout = Some(convert::duration_wire(timeout.saturating_sub(waited)));
        if !request.outputs.is_empty() {
            request.outputs.extend(turn.outputs());
        } else if turn.ends() {
            // All but the state, which nobody reads.
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
