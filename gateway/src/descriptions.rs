//! Descriptions of the server and its models: metadata, configuration, statistics, the repository
//! index. Built once as gRPC messages; REST writes the same as JSON.

use millrace_proto::inference::{
    self as wire, InferBatchStatistics, InferStatistics, ModelConfig, ModelInput, ModelMetadataResponse,
    ModelOutput, ModelParameter, ModelSequenceBatching, ModelStatistics, ModelTransactionPolicy,
    ModelVersionPolicy, ServerMetadataResponse, StatisticDuration,
    model_config::SchedulingChoice,
    model_metadata_response::TensorMetadata,
    model_sequence_batching::State,
    model_version_policy::{PolicyChoice, Specific},
    repository_index_response::ModelIndex,
};
use millrace_proto::pages::PageBudget;
use millrace_types::limits::{INDEX_BYTES_MAX, text_prefix};
use millrace_types::{
    DataType, Failure, FunctionName, Reason, RevisionKey, Runtime, SequenceSpec, TensorSpec,
};

use prost::Message;

use crate::backend::{Kind, ModelAvailability, ModelRevision};
use crate::call::CallContext;
use crate::handler::InferenceHandler;
use crate::metrics::{Cumulative, RevisionCounts};

/// Most bytes of the index's reason for a model that does not serve.
const REASON_BYTES_MAX: usize = 256;
/// Name of the server in its metadata.
const SERVER: &str = "millrace";
/// Extensions of the protocol that are fully served.
const EXTENSIONS: [&str; 6] = [
    "model_repository",
    "model_configuration",
    "statistics",
    "binary_tensor_data",
    "sequence",
    "sequence(string_id)",
];

pub(crate) fn server() -> ServerMetadataResponse {
    ServerMetadataResponse {
        name: SERVER.to_owned(),
        version: millrace_proto::BUILD.to_owned(),
        extensions: EXTENSIONS.map(str::to_owned).to_vec(),
    }
}

const fn platform(kind: Kind) -> &'static str {
    match kind {
        Kind::Function(Runtime::Onnx) => "millrace_onnx",
        Kind::Function(Runtime::Process) => "millrace_process",
        Kind::Workflow => "millrace_workflow",
    }
}

pub(crate) fn metadata(model: &ModelRevision) -> ModelMetadataResponse {
    let tensor = |spec: &TensorSpec| TensorMetadata {
        name: spec.name.clone(),
        datatype: spec.datatype.to_string(),
        shape: spec.wire_shape(),
    };
    ModelMetadataResponse {
        name: model.key.name.to_string(),
        versions: model.revisions.iter().map(ToString::to_string).collect(),
        platform: platform(model.kind).to_owned(),
        inputs: model.inputs.iter().map(tensor).collect(),
        outputs: model.outputs.iter().map(tensor).collect(),
    }
}

/// Returns a datatype in the form of a model's configuration.
const fn config_type(datatype: DataType) -> wire::DataType {
    match datatype {
        DataType::Bool => wire::DataType::TypeBool,
        DataType::Uint8 => wire::DataType::TypeUint8,
        DataType::Uint16 => wire::DataType::TypeUint16,
        DataType::Uint32 => wire::DataType::TypeUint32,
        DataType::Uint64 => wire::DataType::TypeUint64,
        DataType::Int8 => wire::DataType::TypeInt8,
        DataType::Int16 => wire::DataType::TypeInt16,
        DataType::Int32 => wire::DataType::TypeInt32,
        DataType::Int64 => wire::DataType::TypeInt64,
        DataType::Fp16 => wire::DataType::TypeFp16,
        DataType::Bf16 => wire::DataType::TypeBf16,
        DataType::Fp32 => wire::DataType::TypeFp32,
        DataType::Fp64 => wire::DataType::TypeFp64,
        DataType::Bytes => wire::DataType::TypeString,
    }
}

/// Returns a model's configuration. `max_batch_size` is 0, which in the protocol means that the
/// shapes are complete and include any batch dimension.
pub(crate) fn config(model: &ModelRevision) -> ModelConfig {
    let parameter = |name: &str, value: String| (name.to_owned(), ModelParameter { string_value: value });
    let input = |spec: &TensorSpec| ModelInput {
        name: spec.name.clone(),
        data_type: config_type(spec.datatype).into(),
        dims: spec.wire_shape(),
        ..ModelInput::default()
    };
    let output = |spec: &TensorSpec| ModelOutput {
        name: spec.name.clone(),
        data_type: config_type(spec.datatype).into(),
        dims: spec.wire_shape(),
        ..ModelOutput::default()
    };
    let versions = model.revisions.iter().map(|revision| i64::try_from(revision.get()).unwrap_or(i64::MAX));
    let policy = PolicyChoice::Specific(Specific { versions: versions.collect() });
    ModelConfig {
        name: model.key.name.to_string(),
        platform: platform(model.kind).to_owned(),
        backend: SERVER.to_owned(),
        runtime: model.kind.runtime().to_owned(),
        version_policy: Some(ModelVersionPolicy { policy_choice: Some(policy) }),
        max_batch_size: 0,
        input: model.inputs.iter().map(input).collect(),
        output: model.outputs.iter().map(output).collect(),
        parameters: [
            parameter("idempotent", model.idempotent.to_string()),
            parameter("timeout_ms", model.timeout.as_millis().to_string()),
            parameter("weights_bytes", model.weights.get().to_string()),
        ]
        .into(),
        model_transaction_policy: Some(ModelTransactionPolicy { decoupled: false }),
        scheduling_choice: model.sequences.as_ref().map(sequence_batching),
        ..ModelConfig::default()
    }
}

/// Returns how a model keeps state, in the form that clients of the protocol expect. Clients neither
/// send nor receive the state's tensors.
fn sequence_batching(sequences: &SequenceSpec) -> SchedulingChoice {
    let state = sequences.state.iter().map(|pair| State {
        input_name: pair.input.clone(),
        output_name: pair.output.clone(),
        ..State::default()
    });
    SchedulingChoice::SequenceBatching(ModelSequenceBatching {
        max_sequence_idle_microseconds: u64::try_from(sequences.idle.as_micros()).unwrap_or(u64::MAX),
        state: state.collect(),
        ..ModelSequenceBatching::default()
    })
}

/// Puts a part for each model into a single response. The protocol has no pages. A response that
/// would be too large is refused, because clients would take a truncated list for the whole.
fn all_in_one<M: Message>(parts: impl Iterator<Item = M>) -> Result<Vec<M>, Failure> {
    let mut room = PageBudget::of(INDEX_BYTES_MAX);
    let take = |part: M| {
        let too_large = || {
            let message = format!(
                "a response for all models has more than {INDEX_BYTES_MAX} bytes: ask for one model by its name, or list functions in pages ('millrace get functions')"
            );
            Failure { retryable: false, ..Failure::new(Reason::ByteBudgetExceeded, message) }
        };
        if room.take(&part) { Ok(part) } else { Err(too_large()) }
    };
    parts.map(take).collect()
}

/// Returns the state of every model of the caller's tenant, or only of the ready models.
pub(crate) fn index(
    front: &InferenceHandler,
    call: &CallContext,
    ready_only: bool,
) -> Result<Vec<ModelIndex>, Failure> {
    let models = front.backend.index(&call.tenant);
    let wanted = models.iter().filter(|model| !ready_only || model.availability == ModelAvailability::Ready);
    let entry = |model: &std::sync::Arc<ModelRevision>| {
        let (state, reason) = match &model.availability {
            ModelAvailability::Ready => ("READY", String::new()),
            ModelAvailability::Preparing => ("LOADING", "being prepared".to_owned()),
            ModelAvailability::Disabled => ("UNAVAILABLE", "unloaded".to_owned()),
            ModelAvailability::Away(why) | ModelAvailability::Unavailable(why) => {
                ("UNAVAILABLE", text_prefix(why, REASON_BYTES_MAX).to_owned())
            }
        };
        ModelIndex {
            name: model.key.name.to_string(),
            version: model.revision.to_string(),
            state: state.to_owned(),
            reason,
        }
    };
    all_in_one(wanted.map(entry))
}

/// Returns the statistics of a revision, of all revisions of a model if `version` is empty, or of all
/// models of the caller's tenant if `name` is also empty.
pub(crate) fn statistics(
    front: &InferenceHandler,
    call: &CallContext,
    name: &str,
    version: &str,
) -> Result<Vec<ModelStatistics>, Failure> {
    if !version.is_empty() {
        return Ok(vec![statistics_of(front, &*front.find(call, name, version)?)]);
    }
    let all = front.backend.index(&call.tenant);
    if name.is_empty() {
        return all_in_one(all.iter().map(|model| statistics_of(front, model)));
    }
    let named: Vec<_> = match FunctionName::new(name) {
        Ok(name) => all.iter().filter(|model| model.key.name == name).collect(),
        Err(_) => Vec::new(),
    };
    if named.is_empty() {
        let message = format!("no function {name:?} in tenant {}", call.tenant);
        return Err(Failure::new(Reason::FunctionNotFound, message));
    }
    Ok(named.into_iter().map(|model| statistics_of(front, model)).collect())
}

fn statistics_of(front: &InferenceHandler, model: &ModelRevision) -> ModelStatistics {
    let key = RevisionKey { function: model.key.clone(), revision: model.revision };
    let tally = front.meters.find(&key);
    let identity = ModelStatistics {
        name: key.function.name.to_string(),
        version: key.revision.to_string(),
        inference_stats: Some(InferStatistics::default()),
        ..ModelStatistics::default()
    };
    tally.map_or(identity.clone(), |tally| counted(identity, &tally))
}

fn counted(identity: ModelStatistics, tally: &RevisionCounts) -> ModelStatistics {
    let duration = |of: &Cumulative| {
        let (count, ns) = of.read();
        Some(StatisticDuration { count, ns })
    };
    let (answered, _) = tally.success.read();
    let batch = InferBatchStatistics {
        batch_size: 1,
        compute_input: duration(&tally.swap),
        compute_infer: duration(&tally.run),
        compute_output: duration(&tally.output),
    };
    ModelStatistics {
        last_inference: tally.last_inference_ms(),
        inference_count: answered,
        // The gateway does not batch requests: each request is an execution.
        execution_count: answered,
        inference_stats: Some(InferStatistics {
            success: duration(&tally.success),
            fail: duration(&tally.fail),
            queue: duration(&tally.queue),
            compute_input: duration(&tally.swap),
            compute_infer: duration(&tally.run),
            compute_output: duration(&tally.output),
            ..InferStatistics::default()
        }),
        batch_stats: if answered > 0 { vec![batch] } else { Vec::new() },
        ..identity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_for_too_many_models_is_refused_and_not_truncated() {
        let index = |models: usize| {
            let entry = ModelIndex { reason: "x".repeat(1_000), ..ModelIndex::default() };
            all_in_one(std::iter::repeat_n(entry, models)).map(|all| all.len())
        };
        assert_eq!(index(10_000), Ok(10_000));
        let refused = index(20_000).unwrap_err();
        assert_eq!((refused.reason, refused.retryable), (Reason::ByteBudgetExceeded, false));
        assert!(refused.message.contains("16777216 bytes"), "{refused}");
    }
}
