//! A single inference over gRPC: typed or raw contents in, raw contents out.

use std::sync::Arc;

use bytes::Bytes;
use millrace_proto::inference::model_infer_request::InferInputTensor;
use millrace_proto::inference::model_infer_response::InferOutputTensor;
use millrace_proto::inference::{InferParameter, ModelInferRequest, ModelInferResponse};
use millrace_types::{Failure, Reason};
use tonic::Response;
use tonic::metadata::AsciiMetadataValue;

use super::contents;
use crate::backend::{ModelRevision, NamedTensor, RequestContents};
use crate::budget::ByteCharge;
use crate::call::CallContext;
use crate::compression::COMPRESS_APART_MIN;
use crate::config::message_len;
use crate::handler::{
    ClaimedInput, InferenceHandler, InferenceResponse, RequestInProgress, check_named, check_requested,
    check_size,
};
use crate::header_names::{SERVED_BY, SERVER_TIMING};
use crate::parameters::{ParameterValue, RequestParameters, refuse_unserved};

/// Responds to a call of a single request.
pub(super) async fn infer(
    front: &InferenceHandler,
    call: &CallContext,
    request: ModelInferRequest,
) -> Result<Response<ModelInferResponse>, Failure> {
    let mut run = front.begin(call);
    let (answer, id) = match answer(&mut run, request, call.ledger.claim()).await {
        Ok((answer, id, charge)) => {
            if let Some(charge) = charge {
                call.ledger.answer(charge);
            }
            (answer, id)
        }
        Err(failure) => return Err(run.fail(failure)),
    };
    let served_by = answer.completion.served_by.clone();
    let is_large = answer.bytes() >= COMPRESS_APART_MIN as u64;
    let (answer, message) = response(answer, id);
    let mut response = Response::new(message);
    if is_large {
        // Otherwise tonic would compress the response on the runtime's threads.
        response.disable_compression();
    }
    let times = run.succeed(&answer);
    // The value has only digits, letters and punctuation, so the value is always valid.
    if let Ok(timing) = AsciiMetadataValue::try_from(times.to_string()) {
        response.metadata_mut().insert(SERVER_TIMING, timing);
    }
    // A worker may report a GPU type that no header can carry.
    if let Some(Ok(served_by)) = served_by.map(|it| AsciiMetadataValue::try_from(&*it)) {
        response.metadata_mut().insert(SERVED_BY, served_by);
    }
    Ok(response)
}

/// Executes a charged request. Returns the response, the id to echo, and the charge of the response.
pub(super) async fn answer(
    run: &mut RequestInProgress<'_>,
    mut request: ModelInferRequest,
    charge: Option<ByteCharge>,
) -> Result<(InferenceResponse, String, Option<ByteCharge>), Failure> {
    let name = std::mem::take(&mut request.model_name);
    let version = std::mem::take(&mut request.model_version);
    let id = std::mem::take(&mut request.id);
    let front = run.front();
    let len_max = message_len(front.limits.message_max);
    let mut kept = None;
    let read = {
        let kept = &mut kept;
        move |model: Arc<ModelRevision>| async move {
            let typed =
                request.inputs.iter().filter_map(|input| input.contents.as_ref()).map(contents::elements);
            let elements: usize = typed.sum();
            // The charge moves along, because the work continues when the call is cancelled.
            let read = move || (read_request(&model, request, len_max), charge);
            let (contents, charge) = front.convert(elements, read).await?;
            *kept = charge;
            contents
        }
    };
    let answer = run.answer(&name, &version, read).await?;
    if let Some(charge) = &mut kept {
        charge.become_response(answer.bytes() + id.len() as u64)?;
    }
    Ok((answer, id, kept))
}

/// Reads a request, and checks the request against the model.
pub(crate) fn read_request(
    model: &ModelRevision,
    request: ModelInferRequest,
    len_max: usize,
) -> Result<RequestContents, Failure> {
    let parameters = RequestParameters::read(values(&request.parameters))?;
    for input in &request.inputs {
        refuse_unserved(&input.name, values(&input.parameters))?;
    }
    for output in &request.outputs {
        refuse_unserved(&output.name, values(&output.parameters))?;
    }
    let outputs = check_requested(model, request.outputs.iter().map(|output| output.name.as_str()))?;
    let named: Vec<_> = request
        .inputs
        .iter()
        .map(|input| ClaimedInput { name: &input.name, datatype: &input.datatype, shape: &input.shape })
        .collect();
    let expected = check_named(&model.inputs, &named, len_max)?;
    let raw = raw_contents(&request.inputs, request.raw_input_contents)?;
    let mut inputs = Vec::with_capacity(request.inputs.len());
    for ((input, (datatype, size)), raw) in request.inputs.into_iter().zip(expected).zip(raw) {
        let data = match (raw, &input.contents) {
            (Some(raw), _) => {
                check_size(&input.name, size, raw.len())?;
                raw
            }
            (None, Some(typed)) => contents::raw(&input.name, datatype, size, typed)?,
            (None, None) => {
                let message =
                    format!("input {:?} has no contents: send {size} bytes of {datatype}", input.name);
                return Err(Failure::new(Reason::InvalidInput, message));
            }
        };
        inputs.push(NamedTensor { name: input.name, datatype, shape: input.shape, data });
    }
    Ok(RequestContents { inputs, outputs, parameters })
}

/// Returns the raw contents of each input, or `None` for all inputs. A request must use a single kind
/// of contents.
fn raw_contents(inputs: &[InferInputTensor], raw: Vec<Bytes>) -> Result<Vec<Option<Bytes>>, Failure> {
    if raw.is_empty() {
        return Ok(vec![None; inputs.len()]);
    }
    if let Some(mixed) = inputs.iter().find(|input| input.contents.is_some()) {
        let message = format!(
            "input {:?} has typed contents in a request with raw_input_contents: use one kind for all",
            mixed.name
        );
        return Err(Failure::new(Reason::InvalidInput, message));
    }
    if raw.len() != inputs.len() {
        let found = raw.len();
        let expected = inputs.len();
        return Err(Failure::malformed(format!(
            "{found} raw_input_contents for {expected} inputs: send one for each"
        )));
    }
    Ok(raw.into_iter().map(Some).collect())
}

fn values<'a>(
    parameters: impl IntoIterator<Item = (&'a String, &'a InferParameter)>,
) -> impl Iterator<Item = (&'a str, ParameterValue<'a>)> {
    parameters.into_iter().map(|(name, value)| (name.as_str(), ParameterValue::from(value)))
}

/// Builds the response message, and moves the bytes of the outputs into it.
pub(super) fn response(mut answer: InferenceResponse, id: String) -> (InferenceResponse, ModelInferResponse) {
    let tensors = std::mem::take(&mut answer.completion.outputs);
    let mut outputs = Vec::with_capacity(tensors.len());
    let mut raw_output_contents = Vec::with_capacity(tensors.len());
    for NamedTensor { name, datatype, shape, data } in tensors {
        let datatype = datatype.as_str().to_owned();
        outputs.push(InferOutputTensor { name, datatype, shape, ..InferOutputTensor::default() });
        raw_output_contents.push(data);
    }
    let response = ModelInferResponse {
        model_name: answer.model.key.name.to_string(),
        model_version: answer.model.revision.to_string(),
        id,
        outputs,
        raw_output_contents,
        ..ModelInferResponse::default()
    };
    (answer, response)
}
