//! Descriptions of the server and its models, in the protocol's JSON.

use millrace_proto::inference::model_config::SchedulingChoice;
use millrace_proto::inference::model_sequence_batching::State;
use millrace_proto::inference::model_version_policy::PolicyChoice;
use millrace_proto::inference::{
    DataType, InferStatistics, ModelConfig, ModelMetadataResponse, ModelSequenceBatching, ModelStatistics,
    ModelVersionPolicy, ServerMetadataResponse, StatisticDuration, model_metadata_response::TensorMetadata,
    repository_index_response::ModelIndex,
};
use serde_json::{Map, Value as Json, json};

pub(super) fn server(said: &ServerMetadataResponse) -> Json {
    json!({ "name": said.name, "version": said.version, "extensions": said.extensions })
}

pub(super) fn metadata(said: &ModelMetadataResponse) -> Json {
    let tensor = |tensor: &TensorMetadata| json!({ "name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape });
    json!({
        "name": said.name,
        "versions": said.versions,
        "platform": said.platform,
        "inputs": said.inputs.iter().map(tensor).collect::<Vec<_>>(),
        "outputs": said.outputs.iter().map(tensor).collect::<Vec<_>>(),
    })
}

pub(super) fn index(said: &[ModelIndex]) -> Json {
    let entry = |model: &ModelIndex| {
        let mut entry = json!({ "name": model.name, "version": model.version, "state": model.state });
        if !model.reason.is_empty() {
            entry["reason"] = json!(model.reason);
        }
        entry
    };
    said.iter().map(entry).collect()
}

/// Returns a configuration in protobuf's JSON form, with the original field names.
pub(super) fn config(said: &ModelConfig) -> Json {
    let tensor = |name: &str, datatype: i32, dims: &[i64]| {
        let datatype = DataType::try_from(datatype).unwrap_or(DataType::TypeInvalid);
        json!({ "name": name, "data_type": datatype.as_str_name(), "dims": dims })
    };
    let inputs = said.input.iter().map(|input| tensor(&input.name, input.data_type, &input.dims));
    let outputs = said.output.iter().map(|output| tensor(&output.name, output.data_type, &output.dims));
    let parameters = said
        .parameters
        .iter()
        .map(|(name, value)| (name.clone(), json!({ "string_value": value.string_value })));
    let decoupled = said.model_transaction_policy.is_some_and(|policy| policy.decoupled);
    let mut config = json!({
        "name": said.name,
        "platform": said.platform,
        "backend": said.backend,
        "runtime": said.runtime,
        "version_policy": version_policy(said.version_policy.as_ref()),
        "max_batch_size": said.max_batch_size,
        "input": inputs.collect::<Vec<_>>(),
        "output": outputs.collect::<Vec<_>>(),
        "parameters": parameters.collect::<Map<_, _>>(),
        "model_transaction_policy": { "decoupled": decoupled },
    });
    if let Some(SchedulingChoice::SequenceBatching(sequences)) = &said.scheduling_choice {
        config["sequence_batching"] = sequence_batching(sequences);
    }
    config
}

fn sequence_batching(said: &ModelSequenceBatching) -> Json {
    let state = |state: &State| json!({ "input_name": state.input_name, "output_name": state.output_name });
    json!({
        "max_sequence_idle_microseconds": said.max_sequence_idle_microseconds,
        "state": said.state.iter().map(state).collect::<Vec<_>>(),
    })
}

fn version_policy(policy: Option<&ModelVersionPolicy>) -> Json {
    match policy.and_then(|policy| policy.policy_choice.as_ref()) {
        Some(PolicyChoice::Specific(specific)) => json!({ "specific": { "versions": specific.versions } }),
        Some(PolicyChoice::Latest(latest)) => json!({ "latest": { "num_versions": latest.num_versions } }),
        Some(PolicyChoice::All(_)) => json!({ "all": {} }),
        None => json!({}),
    }
}

pub(super) fn statistics(said: &[ModelStatistics]) -> Json {
    json!({ "model_stats": said.iter().map(model_statistics).collect::<Vec<_>>() })
}

fn duration(of: Option<&StatisticDuration>) -> Json {
    let StatisticDuration { count, ns } = of.copied().unwrap_or_default();
    json!({ "count": count, "ns": ns })
}

fn model_statistics(said: &ModelStatistics) -> Json {
    let batch = |batch: &millrace_proto::inference::InferBatchStatistics| {
        json!({
            "batch_size": batch.batch_size,
            "compute_input": duration(batch.compute_input.as_ref()),
            "compute_infer": duration(batch.compute_infer.as_ref()),
            "compute_output": duration(batch.compute_output.as_ref()),
        })
    };
    let stats = said.inference_stats.unwrap_or_default();
    json!({
        "name": said.name,
        "version": said.version,
        "last_inference": said.last_inference,
        "inference_count": said.inference_count,
        "execution_count": said.execution_count,
        "inference_stats": inference_stats(&stats),
        "batch_stats": said.batch_stats.iter().map(batch).collect::<Vec<_>>(),
        "memory_usage": [],
        "response_stats": {},
    })
}

fn inference_stats(stats: &InferStatistics) -> Json {
    json!({
        "success": duration(stats.success.as_ref()),
        "fail": duration(stats.fail.as_ref()),
        "queue": duration(stats.queue.as_ref()),
        "compute_input": duration(stats.compute_input.as_ref()),
        "compute_infer": duration(stats.compute_infer.as_ref()),
        "compute_output": duration(stats.compute_output.as_ref()),
        "cache_hit": duration(stats.cache_hit.as_ref()),
        "cache_miss": duration(stats.cache_miss.as_ref()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_describes_the_state_of_a_model() {
        let state = State { input_name: "h_in".into(), output_name: "h_out".into(), ..State::default() };
        let sequences = ModelSequenceBatching {
            max_sequence_idle_microseconds: 5_000_000,
            state: vec![state],
            ..ModelSequenceBatching::default()
        };
        let scheduling_choice = Some(SchedulingChoice::SequenceBatching(sequences));
        let said = config(&ModelConfig { scheduling_choice, ..ModelConfig::default() });
        let expected = json!({
            "max_sequence_idle_microseconds": 5_000_000,
            "state": [{ "input_name": "h_in", "output_name": "h_out" }],
        });
        assert_eq!(said["sequence_batching"], expected);
        assert_eq!(config(&ModelConfig::default()).get("sequence_batching"), None);
    }
}
