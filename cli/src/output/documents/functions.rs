//! The document of a function: its manifest, with a `status` beside it. The digest of the stored
//! artifact names the model, not the file from which it was uploaded. The printed document can
//! therefore be applied again.

use millrace_client::messages as wire;
use millrace_types::Runtime;
use millrace_types::manifest::ManifestKind;
use serde::Serialize;

use super::{Condition, ManifestDocument, ModelMetadataDocument, Slo, Tensor, span};
use crate::output::text::{moment, percent, sm_range};

pub(crate) type FunctionDocument =
    ManifestDocument<ModelMetadataDocument, FunctionSpecDocument, FunctionStatusDocument>;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FunctionSpecDocument {
    runtime: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<StoredArtifact>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<StoredArtifact>,
    slo: Option<Slo>,
    timeout: Option<String>,
    resources: Resources,
    idempotent: bool,
    replicas: u32,
    priority: u32,
    residency: Residency,
    #[serde(skip_serializing_if = "Option::is_none")]
    batching: Option<Batching>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequences: Option<Sequences>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slices: Option<SliceCount>,
}

/// The artifact of the newest revision.
#[derive(Debug, Serialize)]
struct StoredArtifact {
    digest: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<u32>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Residency {
    pin: bool,
    min_warm: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    evict_after: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Batching {
    max_size: u32,
    max_wait: Option<String>,
}

#[derive(Debug, Serialize)]
struct Sequences {
    state: Vec<StatePair>,
    idle: Option<String>,
    max: u32,
}

#[derive(Debug, Serialize)]
struct StatePair {
    input: String,
    output: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Resources {
    gpu_memory: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sm: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quota_request: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quota_limit: Option<String>,
}

#[derive(Debug, Serialize)]
struct SliceCount {
    min: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    max: Option<u32>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FunctionStatusDocument {
    enabled: bool,
    conditions: Vec<Condition>,
    revisions: Vec<Revision>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Revision {
    number: u64,
    digest: String,
    bytes: u64,
    created_at: Option<String>,
    model: Option<Model>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Model {
    weights_bytes: u64,
    parameters: u64,
    launches: u32,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

impl From<wire::Function> for FunctionDocument {
    fn from(function: wire::Function) -> Self {
        let digest = newest_digest(&function.revisions);
        let spec = function.spec.unwrap_or_default();
        let (model, program) = match spec.runtime == Runtime::Process.as_str() {
            true => (None, digest.map(|digest| StoredArtifact { digest, processes: Some(spec.processes) })),
            false => (digest.map(|digest| StoredArtifact { digest, processes: None }), None),
        };
        let metadata = ModelMetadataDocument {
            name: spec.name,
            tenant: spec.tenant,
            labels: spec.labels.into_iter().collect(),
            generation: function.generation,
            resource_version: function.resource_version,
            created_at: function.created_at.and_then(moment),
            updated_at: function.updated_at.and_then(moment),
            updated_by: function.updated_by,
        };
        let spec = FunctionSpecDocument {
            runtime: spec.runtime,
            model,
            program,
            slo: spec.slo.map(Slo::from),
            timeout: spec.timeout.and_then(span),
            resources: resources(spec.resources, spec.slices.as_ref()),
            slices: spec
                .slices
                .as_ref()
                .map(|asked| SliceCount { min: asked.min, max: Some(asked.max).filter(|&max| max > 0) }),
            idempotent: spec.idempotent,
            replicas: spec.replicas,
            priority: spec.priority,
            residency: residency(spec.residency.unwrap_or_default()),
            batching: spec.batching.map(|batching| Batching {
                max_size: batching.max_size,
                max_wait: batching.max_wait.and_then(span),
            }),
            sequences: spec.sequences.map(Sequences::from),
        };
        let status = FunctionStatusDocument {
            enabled: function.enabled,
            conditions: function.conditions.into_iter().map(Condition::from).collect(),
            revisions: function.revisions.into_iter().map(Revision::from).collect(),
        };
        Self::new(ManifestKind::Function, metadata, spec, status)
    }
}

fn newest_digest(revisions: &[wire::Revision]) -> Option<String> {
    let newest = revisions.iter().max_by_key(|revision| revision.number)?;
    newest.artifact.as_ref().map(|artifact| artifact.digest.clone())
}

fn resources(asked: Option<wire::Resources>, slices: Option<&wire::AskedSlices>) -> Resources {
    let terms = slices.and_then(|slices| slices.terms);
    Resources {
        gpu_memory: asked.map(|asked| asked.gpu_memory_bytes),
        sm: terms.map(|terms| sm_range(&terms)),
        quota_request: terms.map(|terms| percent(terms.quota_request_permille)),
        quota_limit: terms.map(|terms| percent(terms.quota_limit_permille)),
    }
}

fn residency(wire: wire::Residency) -> Residency {
    let wire::Residency { pin, min_warm, evict_after } = wire;
    Residency { pin, min_warm, evict_after: evict_after.and_then(span) }
}

impl From<wire::Sequences> for Sequences {
    fn from(wire: wire::Sequences) -> Self {
        let pair = |wire::SequenceState { input, output }| StatePair { input, output };
        let state = wire.state.into_iter().map(pair).collect();
        Self { state, idle: wire.idle.and_then(span), max: wire.max }
    }
}

impl From<wire::Revision> for Revision {
    fn from(revision: wire::Revision) -> Self {
        let artifact = revision.artifact.unwrap_or_default();
        Self {
            number: revision.number,
            digest: artifact.digest,
            bytes: artifact.bytes,
            created_at: revision.created_at.and_then(moment),
            model: revision.model.map(Model::from),
        }
    }
}

impl From<wire::ModelSummary> for Model {
    fn from(model: wire::ModelSummary) -> Self {
        Self {
            weights_bytes: model.weights_bytes,
            parameters: model.parameters,
            launches: model.launches,
            inputs: model.inputs.into_iter().map(Tensor::from).collect(),
            outputs: model.outputs.into_iter().map(Tensor::from).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{ListFormat, document};
    use millrace_proto::convert::function_spec_wire;
    use millrace_types::Digest;
    use millrace_types::manifest::{self, Manifest, ModelSource};

    const PRINTED: &str = r#"{
  "apiVersion": "millrace/v1",
  "kind": "Function",
  "metadata": {
    "name": "digits",
    "tenant": "team",
    "labels": {
      "of": "vision"
    },
    "generation": 2,
    "resourceVersion": 9,
    "createdAt": "1970-01-01T00:01:00Z",
    "updatedAt": null,
    "updatedBy": "alice"
  },
  "spec": {
    "runtime": "onnx",
    "model": {
      "digest": "sha256:ab"
    },
    "slo": {
      "deadline": "50ms",
      "percentile": 0.95
    },
    "timeout": "1m",
    "resources": {
      "gpuMemory": 1024
    },
    "idempotent": true,
    "replicas": 2,
    "priority": 4,
    "residency": {
      "pin": false,
      "minWarm": 1
    },
    "batching": {
      "maxSize": 8,
      "maxWait": "2ms"
    }
  },
  "status": {
    "enabled": true,
    "conditions": [
      {
        "type": "Ready",
        "status": "True",
        "reason": "Prepared",
        "message": ""
      }
    ],
    "revisions": [
      {
        "number": 2,
        "digest": "sha256:ab",
        "bytes": 7,
        "createdAt": null,
        "model": {
          "weightsBytes": 5,
          "parameters": 3,
          "launches": 1,
          "inputs": [
            {
              "name": "x",
              "datatype": "FP32",
              "shape": [
                -1,
                64
              ]
            }
          ],
          "outputs": []
        }
      }
    ]
  }
}"#;

    fn millis(millis: i32) -> Option<prost_types::Duration> {
        Some(prost_types::Duration { seconds: 0, nanos: millis * 1_000_000 })
    }

    fn function() -> wire::Function {
        let spec = wire::FunctionSpec {
            tenant: "team".into(),
            name: "digits".into(),
            labels: [("of".to_owned(), "vision".to_owned())].into(),
            runtime: "onnx".into(),
            slo: Some(wire::Slo { deadline: millis(50), percentile: 0.95 }),
            timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
            resources: Some(wire::Resources { gpu_memory_bytes: 1024 }),
            idempotent: true,
            replicas: 2,
            priority: 4,
            residency: Some(wire::Residency { min_warm: 1, ..Default::default() }),
            batching: Some(wire::Batching { max_size: 8, max_wait: millis(2) }),
            processes: 1,
            sequences: None,
            slices: None,
        };
        let x = wire::TensorSpec {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![-1, 64],
            ..Default::default()
        };
        let model = wire::ModelSummary {
            weights_bytes: 5,
            parameters: 3,
            launches: 1,
            inputs: vec![x],
            outputs: vec![],
        };
        let revision = wire::Revision {
            number: 2,
            artifact: Some(wire::Artifact { digest: "sha256:ab".into(), bytes: 7 }),
            model: Some(model),
            created_at: None,
        };
        let ready = wire::Condition {
            r#type: "Ready".into(),
            status: wire::ConditionStatus::True.into(),
            reason: "Prepared".into(),
            message: String::new(),
        };
        wire::Function {
            spec: Some(spec),
            generation: 2,
            resource_version: 9,
            enabled: true,
            revisions: vec![revision],
            conditions: vec![ready],
            created_at: Some(prost_types::Timestamp { seconds: 60, nanos: 0 }),
            updated_at: None,
            updated_by: "alice".into(),
        }
    }

    #[test]
    fn a_function_document_has_every_field() {
        assert_eq!(
            document(ListFormat::Json, &FunctionDocument::from(function())).unwrap().unwrap(),
            PRINTED
        );
    }

    #[test]
    fn a_printed_function_can_be_applied_again() {
        let sequences = "sequences: {state: [{input: h_in, output: h_out}], idle: 5s, max: 3}";
        let digest = Digest::of(b"model");
        for spec in [
            format!("model: {{digest: '{digest}'}}"),
            format!("runtime: process\n  program: {{digest: '{digest}', processes: 2}}"),
            format!("model: {{digest: '{digest}'}}\n  timeout: 1m 10s\n  idempotent: false\n  {sequences}"),
            format!("model: {{digest: '{digest}'}}\n  slo: {{deadline: 1500us}}\n  batching: {{maxSize: 8}}"),
            format!(
                "model: {{digest: '{digest}'}}\n  resources: {{gpuMemory: 64MiB}}\n  residency: {{minWarm: 1, evictAfter: 10m}}"
            ),
            format!(
                "model: {{digest: '{digest}'}}\n  resources: {{sm: 12.5%..50%, quotaRequest: 0.3, quotaLimit: 0.8}}\n  slices: {{min: 3, max: 8}}"
            ),
        ] {
            let head = "apiVersion: millrace/v1\nkind: Function\nmetadata: {name: f, labels: {of: vision}}";
            let written = manifest::parse(&format!("{head}\nspec:\n  {spec}\n")).unwrap();
            let Manifest::Function(function) = &written[0] else { panic!("not a function") };
            assert_eq!(function.model, ModelSource::Cluster(digest));
            let revision = |number, of: &[u8]| {
                let artifact = wire::Artifact { digest: Digest::of(of).to_string(), bytes: 5 };
                wire::Revision { number, artifact: Some(artifact), ..Default::default() }
            };
            let there = wire::Function {
                spec: Some(function_spec_wire(&function.spec)),
                revisions: vec![revision(1, b"older"), revision(2, b"model")],
                updated_by: "alice".into(),
                ..Default::default()
            };
            let shown = FunctionDocument::from(there);
            for format in [ListFormat::Yaml, ListFormat::Json] {
                let text = document(format, &shown).unwrap().unwrap();
                assert_eq!(manifest::parse(&text).unwrap(), written, "{text}");
            }
        }
    }
}
