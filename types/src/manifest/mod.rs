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
//! ---
//! apiVersion: millrace/v1
//! kind: Function               # keeps state from one request of a sequence to the next
//! metadata: {name: counter}
//! spec:
//!   model: {file: counter.onnx}
//!   sequences:
//!     state: [{input: h_in, output: h_out}]
//!     idle: 60s                # optional: a sequence that nobody asks for that long ends
//!     max: 64                  # optional: how many at once
//! ---
//! apiVersion: millrace/v1
//! kind: Function               # a program of one's own, beside the GPUs
//! metadata: {name: decode}
//! spec:
//!   runtime: process
//!   program:
//!     file: decode             # an executable, or a script that begins with #!
//!     processes: 2             # optional: how many run at one time on a worker
//!     inputs: [{name: jpeg, datatype: UINT8, shape: [-1]}]
//!     outputs: [{name: pixels, datatype: FP32, shape: [N, 64]}]
//! ---
//! apiVersion: millrace/v1
//! kind: Workflow               # see [`crate::workflow`]
//! metadata: {name: traffic}
//! spec:
//!   slo: {deadline: 500ms}     # optional, as labels, tenant and timeout are
//!   inputs: [frame]
//!   steps:
//!     - name: detect
//!       function: detector
//!       inputs: {image: input.frame}
//!     - name: people
//!       function: person-net   # or workflow: NAME
//!       inputs: {crop: detect.crops}
//!       each: crop             # optional: once for every row
//!       when: detect.found     # optional: only if an element is not zero
//!       deadline: 40ms         # optional: from when all that it takes is there to its answer
//!   outputs: {people: people.scores}
//! ```

mod function;
mod program;
mod workflow;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

pub use function::FunctionManifest;

use crate::function::{DEFAULT_PERCENTILE, DEFAULT_TIMEOUT, Slo};
use crate::ids::{FunctionKey, FunctionName, NameError, TenantName};
use crate::workflow::WorkflowSpec;

/// The only `apiVersion` this build reads.
pub const API_VERSION: &str = "millrace/v1";
/// The kinds this build reads.
pub const KINDS: &[&str] = &["Function", "Workflow"];

/// One document of a manifest, checked.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub enum Manifest {
    /// A function.
    Function(FunctionManifest),
    /// A workflow.
    Workflow(WorkflowSpec),
}

impl Manifest {
    /// The name asked for.
    #[must_use]
    pub fn key(&self) -> &FunctionKey {
        match self {
            Self::Function(function) => &function.spec.key,
            Self::Workflow(workflow) => &workflow.key,
        }
    }

    /// The function, if it is one.
    #[must_use]
    pub fn function(self) -> Option<FunctionManifest> {
        match self {
            Self::Function(function) => Some(function),
            Self::Workflow(_) => None,
        }
    }
}

/// Which field, and what is wrong with it.
type Problem = (&'static str, String);

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
    #[error("document {document}: kind {found:?} is not known: this version has {}", KINDS.join(" and "))]
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
    /// The same name twice.
    #[error("document {document}: {key} is in this file already: rename one of the two")]
    Duplicate {
        /// Which document of the file, from 1.
        document: usize,
        /// The name met again.
        key: FunctionKey,
    },
}

struct Document {
    api_version: String,
    kind: String,
    metadata: Metadata,
    body: Body,
}

/// What a document's kind asks for.
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
enum Body {
    Function(function::Spec),
    Workflow(workflow::Spec),
    /// Of a kind that is not known.
    Unknown,
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
struct SloText {
    deadline: String,
    percentile: Option<f64>,
}

/// By hand, since what `spec` may hold depends on `kind`, and reading it twice would lose where in
/// the file an error is.
impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DocumentVisitor)
    }
}

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a document with apiVersion, kind, metadata and spec")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        const FIELDS: &[&str] = &["apiVersion", "kind", "metadata", "spec"];
        let (mut api_version, mut kind, mut metadata, mut body) =
            (None::<String>, None::<String>, None, None);
        while let Some(key) = map.next_key::<String>()? {
            match (key.as_str(), kind.as_deref()) {
                ("apiVersion", _) => api_version = Some(map.next_value()?),
                ("kind", _) => kind = Some(map.next_value()?),
                ("metadata", _) => metadata = Some(map.next_value()?),
                ("spec", None) => {
                    return Err(A::Error::custom("kind is missing before spec: write it first"));
                }
                ("spec", Some("Function")) => body = Some(Body::Function(map.next_value()?)),
                ("spec", Some("Workflow")) => body = Some(Body::Workflow(map.next_value()?)),
                ("spec", Some(_)) => {
                    map.next_value::<IgnoredAny>()?;
                    body = Some(Body::Unknown);
                }
                (other, _) => return Err(A::Error::unknown_field(other, FIELDS)),
            }
        }
        Ok(Document {
            api_version: api_version.ok_or_else(|| A::Error::missing_field("apiVersion"))?,
            kind: kind.ok_or_else(|| A::Error::missing_field("kind"))?,
            metadata: metadata.ok_or_else(|| A::Error::missing_field("metadata"))?,
            body: body.ok_or_else(|| A::Error::missing_field("spec"))?,
        })
    }
}

/// Reads a manifest of one or more documents.
///
/// # Errors
/// [`ManifestError`] for the first thing that is wrong; nothing of the file is returned then.
pub fn parse(text: &str) -> Result<Vec<Manifest>, ManifestError> {
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
        if !seen.insert(manifest.key().clone()) {
            return Err(ManifestError::Duplicate { document: number, key: manifest.key().clone() });
        }
        manifests.push(manifest);
    }
    Ok(manifests)
}

impl Document {
    fn check(self, document: usize) -> Result<Manifest, ManifestError> {
        if self.api_version != API_VERSION {
            return Err(ManifestError::ApiVersion { document, found: self.api_version });
        }
        let checked = match self.body {
            Body::Function(spec) => spec.check(self.metadata).map(Manifest::Function),
            Body::Workflow(spec) => spec.check(self.metadata).map(Manifest::Workflow),
            Body::Unknown => return Err(ManifestError::Kind { document, found: self.kind }),
        };
        checked.map_err(|(field, problem)| ManifestError::Field { document, field, problem })
    }
}

impl Metadata {
    fn key(&self) -> Result<FunctionKey, Problem> {
        let problem = |e: NameError| ("metadata", e.to_string());
        let tenant = self.tenant.as_deref().map_or(Ok(TenantName::default()), TenantName::new);
        Ok(FunctionKey {
            tenant: tenant.map_err(problem)?,
            name: FunctionName::new(&self.name).map_err(problem)?,
        })
    }
}

impl SloText {
    fn check(self) -> Result<Slo, Problem> {
        Ok(Slo {
            deadline: duration("spec.slo.deadline", &self.deadline)?,
            percentile: self.percentile.unwrap_or(DEFAULT_PERCENTILE),
        })
    }
}

fn timeout(text: Option<String>) -> Result<Duration, Problem> {
    text.map_or(Ok(DEFAULT_TIMEOUT), |text| duration("spec.timeout", &text))
}

fn duration(field: &'static str, text: &str) -> Result<Duration, Problem> {
    humantime::parse_duration(text)
        .map_err(|e| (field, format!("{text:?} is not a duration ({e}): write one such as 50ms or 2s")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
