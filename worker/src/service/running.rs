//! Runs an accepted request and builds its response. The request's inputs are gathered and packed
//! for the actors. Its outputs are stored here as objects, or answered with their bytes. The
//! request was checked before ([`super`]). Outputs that are state go to the request's sequence.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::trace::{self, FinishedSpan};
use millrace_proto::{convert, worker as wire};
use millrace_types::function::DEFAULT_TIMEOUT;
use millrace_types::{Bytes, DataId, Failure, Reason, RequestId, RevisionKey, Timestamp};

use crate::actors::fetch_attributes;
use crate::object_handle::{ObjectHandle, TransferRequester};
use crate::objects::{self, GatherError, GatheredInputs, INLINE_BYTES_MAX, InputTensor};
use crate::request::{Attempt, AttemptOutcome, InputTransfer, OnGpus};
use crate::sequences::SequenceTurn;
use crate::signature::InputReader;

use super::WorkerService;
use super::rerun::RerunCopy;
use super::response::{lost, object_of, split_wire};
use crate::tensors;

impl WorkerService {
    /// Runs a request and builds its response. Repeats both if the outputs are lost in between
    /// ([`RerunCopy`]).
    pub(crate) async fn answered(
        &self,
        mut invocation: Attempt,
        gathered: GatheredInputs,
        hold: Option<wire::Hold>,
        mut turn: Option<&mut SequenceTurn>,
    ) -> Result<wire::InvokeResponse, Failure> {
        let mut before = 0;
        loop {
            let again = RerunCopy::of(&invocation, &self.node);
            let completion = match self.node.invoke(invocation).await {
                // Without a sequence, the lost data are inputs, which the response names. In a
                // sequence, the lost data are the state.
                Err(failure) if failure.reason == Reason::DataLost && turn.is_none() => {
                    let ids = |gone: &dyn Fn(&Arc<ObjectHandle>) -> bool| {
                        let gone = gathered.kept.iter().filter(|(_, object)| gone(object));
                        gone.map(|(id, _)| id.clone()).collect::<Vec<_>>()
                    };
                    let gone = ids(&|object| object.is_lost());
                    // No object is lost, but some object could not be copied: the sender must treat
                    // all as lost.
                    return Ok(lost(&if gone.is_empty() { ids(&|_| true) } else { gone }));
                }
                Err(failure) if before > 0 => return Err(failure.after_execution()),
                completion => completion?,
            };
            let mut fetched = gathered.fetched.clone();
            for InputTransfer { input, method, bytes, took } in &completion.outputs.fetches {
                self.objects.count(*method, *bytes);
                fetched.push(objects::fetched(input.clone(), *method, *bytes, *took));
            }
            let attempts = completion.attempts;
            let took = completion.split.total;
            let error =
                match self.response(completion, hold.clone(), &gathered.asker, turn.as_deref_mut()).await {
                    Ok(response) => {
                        let attempts = before + response.attempts;
                        return Ok(wire::InvokeResponse { fetched, attempts, ..response });
                    }
                    Err(error) => error,
                };
            let again = again.filter(|_| matches!(error, tensors::UnpackError::Lost(_)));
            invocation =
                again.and_then(|again| again.after(attempts, took)).ok_or_else(|| unreadable(&error))?;
            tracing::warn!(request = %invocation.request_id, function = %invocation.revision, %error, "outputs were lost before they were answered: running the request again");
            before += attempts;
        }
    }

    /// Gathers a request's inputs and converts the request for the actors. `came` is the time of
    /// its arrival; `None`: now.
    pub(super) async fn invocation(
        &self,
        request: wire::InvokeRequest,
        came: Option<Timestamp>,
        revision: RevisionKey,
        reader: InputReader,
        state: Vec<InputTensor>,
    ) -> Result<(Attempt, GatheredInputs), GatherError> {
        let request_id = RequestId::new(&request.request_id)
            .ok_or_else(|| Failure::malformed("request_id must be 1 to 128 visible ASCII characters"))?;
        let timeout = timeout_of(&request)?;
        let objective = request.objective_micros.map(Duration::from_micros);
        let wanted = objective.or_else(|| self.node.deadline_of(&revision));
        let asker = self.objects.asker(revision.clone(), wanted, came);
        let gathered = self.objects.gather(request.inputs, reader, asker);
        let gathered = tokio::time::timeout(timeout, gathered).await;
        let mut gathered = gathered.map_err(|_late| {
            Failure::new(Reason::TimedOut, "the timeout passed while inputs were fetched from other workers")
        })??;
        tell_fetches(&gathered.fetched);
        gathered.inputs.extend(state);
        let packed = tensors::pack(std::mem::take(&mut gathered.inputs))?;
        let invocation = Attempt {
            request_id,
            attempts_left: request.attempts_left,
            revision,
            timeout: timeout.saturating_sub(gathered.took),
            objective: objective.map(|objective| objective.saturating_sub(gathered.took)),
            priority: request.priority,
            inputs: packed.tensors,
            descriptors: packed.descriptors,
            on_gpus: OnGpus { objects: packed.objects, keep: Vec::new() },
            outputs: request.outputs,
            next: Vec::new(),
            cold: Duration::ZERO,
            behind: Duration::ZERO,
            counted: false,
            trial: None,
        };
        Ok((invocation, gathered))
    }

    /// Builds the response. Outputs to be stored become objects if there is capacity; the other
    /// outputs are answered with their bytes.
    async fn response(
        &self,
        completion: AttemptOutcome,
        hold: Option<wire::Hold>,
        asker: &Arc<TransferRequester>,
        mut turn: Option<&mut SequenceTurn>,
    ) -> Result<wire::InvokeResponse, tensors::UnpackError> {
        let AttemptOutcome { outputs: made, split, mut marks, gpu, attempts, .. } = completion;
        let taken = tensors::take(made.tensors, &made.descriptors, &made.objects, made.share)?;
        let mut outputs: Vec<wire::InferTensor> = Vec::with_capacity(taken.len());
        let mut answered = Vec::new();
        let mut told = 0;
        for output in taken {
            let output = match turn.as_deref_mut() {
                None => Some(output),
                Some(turn) => turn.take(output)?,
            };
            // An output that is state belongs to the sequence.
            let Some(output) = output else { continue };
            let mark = marks.remove(&output.name).unwrap_or_default();
            let held = match &hold {
                Some(hold) if !mark.response => self.hold(output, hold, mark.object.as_ref()).await,
                _ => Err(output),
            };
            outputs.push(match held {
                Ok(held) => held,
                Err(output) => {
                    answered.extend(mark.object);
                    told += output.contents.len();
                    let max = self.message_max;
                    let answer = if told > max.get() {
                        // The output's bytes are not read, because an output may fill a GPU.
                        Err(tensors::UnpackError::TooLarge { name: output.name, bytes: Bytes(told), max })
                    } else {
                        tensors::answer(output, asker).await
                    };
                    match answer {
                        Ok(answer) => answer,
                        Err(error) => {
                            // The response is lost, so no caller will know of the objects stored
                            // for it.
                            answered.extend(outputs.iter().filter_map(object_of));
                            self.objects.release(&answered).await;
                            return Err(error);
                        }
                    }
                }
            });
        }
        // The caller gets these outputs as bytes and needs no objects.
        self.objects.release(&answered).await;
        let split = Some(split_wire(split));
        let gpu = gpu.map_or(0, |gpu| gpu.0);
        Ok(wire::InvokeResponse { outputs, split, gpu, attempts, ..wire::InvokeResponse::default() })
    }

    /// Stores an output as an object. Returns the output unchanged if it is to be answered, is
    /// small enough to travel inline, or does not fit.
    async fn hold(
        &self,
        output: InputTensor,
        hold: &wire::Hold,
        object: Option<&DataId>,
    ) -> Result<wire::InferTensor, InputTensor> {
        let bytes = output.contents.len();
        if bytes <= INLINE_BYTES_MAX as u64 || hold.answered.contains(&output.name) {
            return Err(output);
        }
        let time = hold.time.as_ref().and_then(convert::duration).unwrap_or(DEFAULT_TIMEOUT);
        let InputTensor { name, datatype, shape, contents } = output;
        let kept = match object {
            // A process stored the output itself: the object keeps its name.
            Some(id) if self.objects.keep_on(id, time) => Ok(id.clone()),
            _ => self.objects.keep(contents, time).await,
        };
        match kept {
            Ok(id) => {
                let id = Some(convert::data_id_wire(&id));
                let object = wire::Object { id, address: String::new(), bytes };
                let part = wire::HeldPart { object: Some(object), offset: 0, bytes };
                let parts = vec![wire::TensorPart { part: Some(wire::tensor_part::Part::Held(part)) }];
                Ok(wire::InferTensor { name, datatype, shape, parts, ..wire::InferTensor::default() })
            }
            Err(contents) => Err(InputTensor { name, datatype, shape, contents }),
        }
    }
}

/// Returns the remaining timeout that the request states.
pub(super) fn timeout_of(request: &wire::InvokeRequest) -> Result<Duration, Failure> {
    let negative = || Failure::malformed("timeout is negative");
    let timeout = request.timeout.as_ref();
    timeout.map_or(Ok(DEFAULT_TIMEOUT), |wire| convert::duration(wire).ok_or_else(negative))
}

/// Adds the fetches of objects to the request's trace. Inputs are fetched one after the other, and
/// the last fetch has just ended.
fn tell_fetches(fetched: &[wire::Fetched]) {
    let mut ago = Duration::ZERO;
    for fetch in fetched.iter().rev() {
        let took = Duration::from_nanos(fetch.took_ns);
        ago += took;
        let attributes = || fetch_attributes(fetch.method(), &fetch.input, fetch.bytes);
        trace::record_finished(&tracing::Span::current(), "fetch", FinishedSpan { ago, took }, attributes);
    }
}

/// Returns the failure of a request that ran and cannot be answered.
fn unreadable(error: &tensors::UnpackError) -> Failure {
    let reason = match error {
        tensors::UnpackError::Lost(_) => Reason::ExecutorLost,
        tensors::UnpackError::TooLarge { .. } => Reason::ModelFailed,
        _ => Reason::Internal,
    };
    Failure::new(reason, format!("cannot answer the request: {error}")).after_execution()
}
