//! The YAML a user writes. Reading is strict: an unknown key, a wrong kind or the same name twice
//! is an error that says where, and nothing of the file is taken.
//!
//! ```yaml
//! apiVersion: millrace/v1
//! kind: Function
//! metadata:
//!   name: digits
//!   tenant: default          # optional
//!   labels: {team: vision}   # optional
//! spec:
//!   runtime: onnx            # optional
//!   model: {file: digits.onnx}   # relative to this file
//!   slo: {deadline: 50ms, percentile: 0.98}   # optional
//!   timeout: 60s             # optional
//!   resources: {gpuMemory: 64MiB}   # optional
//!   idempotent: true         # optional
//!   replicas: 2              # optional
//!   priority: 4              # optional: 1 goes first, 8 last
//!   residency: {pin: false, minWarm: 1, evictAfter: 10m}   # optional, each of them
//!   batching: {maxSize: 8, maxWait: 2ms}   # optional
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;

use crate::function::{
    DEFAULT_PERCENTILE, DEFAULT_REPLICAS, DEFAULT_TIMEOUT, FunctionSpec, Resources, Runtime, Slo, SpecError,
};
use crate::ids::{FunctionKey, FunctionName, NameError, TenantName};
use crate::serving::{Batching, Priority, Residency, Serving};
use crate::units::{Bytes, ParseBytesError};

/// The only `apiVersion` this build reads.
pub const API_VERSION: &str = "millrace/v1";
/// The kinds this build reads.
pub const KINDS: &[&str] = &["Function"];

/// One document of a manifest, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionManifest {
    /// The function asked for.
    pub spec: FunctionSpec,
    /// Where its model lies, as written: relative to the manifest.
    pub model_file: String,
}

/// Why a manifest was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// Nothing in it.
    #[error("the file has no documents: start with 'apiVersion: {API_VERSION}' and 'kind: Function'")]
    Empty,
    /// Not YAML, or a key or value the schema does not have.
    #[error("{0}")]
    Yaml(String),
    /// Another `apiVersion`.
    #[error("document {document}: apiVersion {found:?} is not known: write {API_VERSION:?}")]
    ApiVersion {
        /// Which document of the file, from 1.
        document: usize,
        /// What it said.
        found: String,
    },
    /// Another `kind`.
    #[error("document {document}: kind {found:?} is not known: this version has {}", KINDS.join(", "))]
    Kind {
        /// Which document of the file, from 1.
        document: usize,
        /// What it said.
        found: String,
    },
    /// A field out of its range.
    #[error("document {document}, {field}: {problem}")]
    Field {
        /// Which document of the file, from 1.
        document: usize,
        /// The field's path.
        field: &'static str,
        /// What is wrong and what to write.
        problem: String,
    },
    /// The same function twice.
    #[error("document {document}: {key} is in this file already: rename one of the two")]
    Duplicate {
        /// Which document of the file, from 1.
        document: usize,
        /// The name met again.
        key: FunctionKey,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Document {
    api_version: String,
    kind: String,
    metadata: Metadata,
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    name: String,
    tenant: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    runtime: Option<String>,
    model: Model,
    slo: Option<SloText>,
    timeout: Option<String>,
    #[serde(default)]
    resources: ResourcesText,
    idempotent: Option<bool>,
    replicas: Option<u32>,
    priority: Option<u64>,
    #[serde(default)]
    residency: ResidencyText,
    batching: Option<BatchingText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    file: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SloText {
    deadline: String,
    percentile: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ResourcesText {
    gpu_memory: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ResidencyText {
    #[serde(default)]
    pin: bool,
    #[serde(default)]
    min_warm: u32,
    evict_after: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct BatchingText {
    max_size: u32,
    max_wait: Option<String>,
}

/// Reads a manifest of one or more documents.
///
/// # Errors
/// [`ManifestError`] for the first thing that is wrong; nothing of the file is returned then.
pub fn parse(text: &str) -> Result<Vec<FunctionManifest>, ManifestError> {
    let documents: Vec<Document> =
        serde_saphyr::from_multiple(text).map_err(|error| ManifestError::Yaml(error.to_string()))?;
    if documents.is_empty() {
        return Err(ManifestError::Empty);
    }
    let mut seen = BTreeSet::new();
    let mut manifests = Vec::with_capacity(documents.len());
    for (index, document) in documents.into_iter().enumerate() {
        let number = index + 1;
        let manifest = document.check(number)?;
        if !seen.insert(manifest.spec.key.clone()) {
            return Err(ManifestError::Duplicate { document: number, key: manifest.spec.key });
        }
        manifests.push(manifest);
    }
    Ok(manifests)
}

impl Document {
    fn check(self, document: usize) -> Result<FunctionManifest, ManifestError> {
        if self.api_version != API_VERSION {
            return Err(ManifestError::ApiVersion { document, found: self.api_version });
        }
        if !KINDS.contains(&self.kind.as_str()) {
            return Err(ManifestError::Kind { document, found: self.kind });
        }
        self.function().map_err(|(field, problem)| ManifestError::Field { document, field, problem })
    }

    fn function(self) -> Result<FunctionManifest, (&'static str, String)> {
        let name = |e: NameError| ("metadata", e.to_string());
        let key = FunctionKey {
            tenant: self
                .metadata
                .tenant
                .as_deref()
                .map_or(Ok(TenantName::default()), TenantName::new)
                .map_err(name)?,
            name: FunctionName::new(&self.metadata.name).map_err(name)?,
        };
        if self.spec.model.file.is_empty() {
            return Err(("spec.model.file", "is empty: name the model's file, relative to this one".into()));
        }
        let spec = FunctionSpec {
            labels: self.metadata.labels,
            runtime: runtime(self.spec.runtime.as_deref())?,
            slo: self.spec.slo.map(SloText::check).transpose()?,
            timeout: self.spec.timeout.map_or(Ok(DEFAULT_TIMEOUT), |text| duration("spec.timeout", &text))?,
            resources: self.spec.resources.check()?,
            idempotent: self.spec.idempotent.unwrap_or(true),
            replicas: self.spec.replicas.unwrap_or(DEFAULT_REPLICAS),
            serving: Serving {
                priority: self.spec.priority.map_or(Ok(Priority::default()), priority)?,
                residency: self.spec.residency.check()?,
                batching: self.spec.batching.map(BatchingText::check).transpose()?,
            },
            key,
        };
        spec.validate().map_err(|e: SpecError| ("spec", e.to_string()))?;
        Ok(FunctionManifest { spec, model_file: self.spec.model.file })
    }
}

impl SloText {
    fn check(self) -> Result<Slo, (&'static str, String)> {
        Ok(Slo {
            deadline: duration("spec.slo.deadline", &self.deadline)?,
            percentile: self.percentile.unwrap_or(DEFAULT_PERCENTILE),
        })
    }
}

impl ResourcesText {
    fn check(self) -> Result<Resources, (&'static str, String)> {
        let parse = |text: String| {
            text.parse::<Bytes>().map_err(|e: ParseBytesError| ("spec.resources.gpuMemory", e.to_string()))
        };
        Ok(Resources { gpu_memory: self.gpu_memory.map(parse).transpose()? })
    }
}

impl ResidencyText {
    fn check(self) -> Result<Residency, (&'static str, String)> {
        let after = self.evict_after.map(|text| duration("spec.residency.evictAfter", &text));
        Ok(Residency { pin: self.pin, min_warm: self.min_warm, evict_after: after.transpose()? })
    }
}

impl BatchingText {
    fn check(self) -> Result<Batching, (&'static str, String)> {
        let wait = self.max_wait.map(|text| duration("spec.batching.maxWait", &text));
        Ok(Batching { max_size: self.max_size, max_wait: wait.unwrap_or(Ok(Duration::ZERO))? })
    }
}

fn priority(level: u64) -> Result<Priority, (&'static str, String)> {
    let (first, last) = (Priority::FIRST, Priority::LAST);
    let problem = || format!("{level} is no priority: write a number from {first} (goes first) to {last}");
    Priority::new(level).ok_or_else(|| ("spec.priority", problem()))
}

fn runtime(text: Option<&str>) -> Result<Runtime, (&'static str, String)> {
    match text {
        None | Some("onnx") => Ok(Runtime::Onnx),
        Some(other) => Err(("spec.runtime", format!("{other:?} is not known: this version has \"onnx\""))),
    }
}

fn duration(field: &'static str, text: &str) -> Result<Duration, (&'static str, String)> {
    humantime::parse_duration(text)
        .map_err(|e| (field, format!("{text:?} is not a duration ({e}): write one such as 50ms or 2s")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const GOOD: &str = "\
apiVersion: millrace/v1
kind: Function
metadata: {name: digits, labels: {team: vision}}
spec:
  model: {file: digits.onnx}
  slo: {deadline: 50ms, percentile: 0.95}
  resources: {gpuMemory: 64MiB}
  replicas: 2
  priority: 2
  residency: {minWarm: 1, evictAfter: 10m}
  batching: {maxSize: 8, maxWait: 2ms}
";

    fn refusal(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        parse(&GOOD.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn reads_every_field() {
        let manifest = parse(GOOD).unwrap().remove(0);
        let mut expected = FunctionSpec::new(FunctionKey {
            tenant: TenantName::default(),
            name: FunctionName::new("digits").unwrap(),
        });
        expected.labels.insert("team".into(), "vision".into());
        expected.slo = Some(Slo { deadline: Duration::from_millis(50), percentile: 0.95 });
        expected.resources.gpu_memory = Some(Bytes::mib(64));
        expected.replicas = 2;
        let (evict_after, max_wait) = (Some(Duration::from_secs(600)), Duration::from_millis(2));
        expected.serving = Serving {
            priority: Priority::new(2).unwrap(),
            residency: Residency { pin: false, min_warm: 1, evict_after },
            batching: Some(Batching { max_size: 8, max_wait }),
        };
        assert_eq!(manifest, FunctionManifest { spec: expected, model_file: "digits.onnx".into() });
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        for (from, to, says) in [
            ("millrace/v1", "v2", "write \"millrace/v1\""),
            ("kind: Function", "kind: Pod", "this version has Function"),
            ("name: digits", "name: Digits", "lower-case letters"),
            ("  model:", "  modle:", "modle"),
            ("0.95", "1.0", "strictly between 0 and 1"),
            ("0.95", "0", "strictly between 0 and 1"),
            ("50ms", "0ms", "slo.deadline is zero"),
            ("50ms", "soon", "such as 50ms or 2s"),
            ("64MiB", "lots", "such as 512MiB"),
            ("replicas: 2", "replicas: 0", "a number from 1 to 64"),
            ("replicas: 2", "replicas: 65", "a number from 1 to 64"),
            ("replicas: 2", "replicas: -1", "replicas"),
            ("replicas: 2", "replicas: two", "replicas"),
            ("priority: 2", "priority: 0", "a number from 1 (goes first) to 8"),
            ("minWarm: 1", "minWarm: 65", "a number from 0 to 64"),
            ("minWarm: 1", "pin: true", "exclude each other"),
            ("10m", "0s", "above zero"),
            ("maxSize: 8", "maxSize: 1", "a number from 2 to 64"),
            ("2ms", "2h", "shorten it"),
            (
                "  batching: {maxSize: 8",
                "  idempotent: false\n  batching: {maxSize: 8",
                "needs idempotent: true",
            ),
            ("file: digits.onnx", "file: ''", "name the model's file"),
        ] {
            let message = refusal(from, to);
            assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
        }
    }

    #[test]
    fn refuses_the_same_name_twice_and_an_empty_file() {
        let twice = format!("{GOOD}---\n{GOOD}");
        assert!(matches!(parse(&twice), Err(ManifestError::Duplicate { document: 2, .. })));
        assert!(parse("").is_err());
    }

    #[test]
    fn reads_several_documents() {
        let two = format!("{GOOD}---\n{}", GOOD.replace("digits", "letters"));
        assert_eq!(parse(&two).unwrap().len(), 2);
    }
}
