//! Strict parsing of the YAML that users write. An unknown key, a wrong kind or a repeated name is
//! an error with its position, and the parser then returns no document of the file. The parser
//! ignores fields that the server adds (`status`, and versions and times in `metadata`), and
//! replaces a `List` by its items. The output of `millrace get -o yaml` for functions, workflows,
//! tenants and the policy can therefore be applied again.
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
//!   model: {file: digits.onnx}   # relative to this file; or digest: a model stored in the cluster
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
//!     idle: 60s                # optional: a sequence ends after this time without a request
//!     max: 64                  # optional: sequences at one time
//! ---
//! apiVersion: millrace/v1
//! kind: Function               # a user's program, beside the GPUs
//! metadata: {name: decode}
//! spec:
//!   runtime: process
//!   program:
//!     file: decode             # an executable, or a script that begins with #!; or, alone, digest
//!     processes: 2             # optional: processes at one time on a worker
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
//!       deadline: 40ms         # optional: from when the step's inputs are ready
//!   outputs: {people: people.scores}
//! ---
//! apiVersion: millrace/v1
//! kind: Tenant                 # the tenant's caps on each node: see [`crate::tenancy`]
//! metadata: {name: acme}
//! spec: {gpusMax: 2, gpuShare: 0.5, memoryShare: 0.5}   # each is optional and sets a cap
//! ---
//! apiVersion: millrace/v1
//! kind: Policy                 # the nodes' scheduling policy: see [`crate::policy`]
//! metadata: {name: cluster}    # the only policy
//! spec:                        # each is optional: the default is the preset's value
//!   preset: lalb-o3            # unified by default
//!   eviction: replicas
//!   overtakesMax: 50           # under lalb-o3 and unified; alpha: paper under torpor
//!   batching: on
//! ```

mod document;
mod function;
mod kind;
mod policy;
mod program;
mod tenant;
mod workflow;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;

pub use document::SourcePosition;
pub use function::{FunctionManifest, ModelSource};
pub use kind::ManifestKind;
pub use policy::POLICY;
pub use tenant::TenantManifest;

use self::document::Document;
use crate::function::{DEFAULT_PERCENTILE, DEFAULT_TIMEOUT, Slo};
use crate::ids::{FunctionKey, FunctionName, NameError, TenantName};
use crate::policy::PolicySpec;
use crate::workflow::WorkflowSpec;

/// The only `apiVersion` this build reads.
pub const API_VERSION: &str = "millrace/v1";
/// The kind of a document that lists other documents under `items`, as `millrace get` prints them.
pub const LIST: &str = "List";

/// A checked document of a manifest.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub enum Manifest {
    /// The declaration of a function.
    Function(FunctionManifest),
    /// The declaration of a workflow.
    Workflow(WorkflowSpec),
    /// The caps on a tenant.
    Tenant(TenantManifest),
    /// The scheduling policy of the cluster.
    Policy(PolicySpec),
}

/// The resource that a document declares; unique within a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ManifestSubject {
    /// A function or a workflow, which share a namespace.
    Model(FunctionKey),
    /// The caps on a tenant.
    Tenant(TenantName),
    /// The scheduling policy of the cluster.
    Policy,
}

impl fmt::Display for ManifestSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model(key) => write!(f, "{key}"),
            Self::Tenant(name) => write!(f, "tenant {name}"),
            Self::Policy => f.write_str("the policy"),
        }
    }
}

impl Manifest {
    /// Returns the function, if the document declares one.
    #[must_use]
    pub fn function(self) -> Option<FunctionManifest> {
        match self {
            Self::Function(function) => Some(function),
            Self::Workflow(_) | Self::Tenant(_) | Self::Policy(_) => None,
        }
    }

    fn subject(&self) -> ManifestSubject {
        match self {
            Self::Function(function) => ManifestSubject::Model(function.spec.key.clone()),
            Self::Workflow(workflow) => ManifestSubject::Model(workflow.key.clone()),
            Self::Tenant(tenant) => ManifestSubject::Tenant(tenant.name.clone()),
            Self::Policy(_) => ManifestSubject::Policy,
        }
    }
}

/// The path of a field, and the fault of its value.
type FieldFault = (&'static str, String);

/// The fault of a refused manifest.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// The file has no documents.
    #[error("the file has no documents: start with 'apiVersion: {API_VERSION}' and 'kind: Function'")]
    Empty,
    /// The file is not YAML, or has a key or value outside the schema.
    #[error("{message}")]
    Yaml {
        /// The kind of the document, if it can be guessed.
        kind: Option<ManifestKind>,
        /// The fault and its line.
        message: String,
    },
    /// The `apiVersion` is unknown.
    #[error("{at}: apiVersion {found:?} is not known: write {API_VERSION:?}")]
    ApiVersion {
        /// The position in the file.
        at: SourcePosition,
        /// The `apiVersion` in the file.
        found: String,
    },
    /// The `kind` is unknown.
    #[error("{at}: kind {found:?} is not known: this version has {}, and {}", ManifestKind::ALL.map(ManifestKind::as_str).join(", "), LIST)]
    Kind {
        /// The position in the file.
        at: SourcePosition,
        /// The `kind` in the file.
        found: String,
    },
    /// A field has an invalid value.
    #[error("{at}, {field}: {problem}")]
    Field {
        /// The position in the file.
        at: SourcePosition,
        /// The kind of the document, if it can be applied.
        kind: Option<ManifestKind>,
        /// The field's path.
        field: &'static str,
        /// The fault and its correction.
        problem: String,
    },
    /// Two documents of the file declare the same resource.
    #[error("{at}: {subject} is in this file already: rename or remove one of the two")]
    Duplicate {
        /// The position of the second document.
        at: SourcePosition,
        /// The resource that both documents declare.
        subject: ManifestSubject,
    },
}

impl ManifestError {
    /// Returns the kind of the refused document, if known.
    #[must_use]
    pub fn kind(&self) -> Option<ManifestKind> {
        match self {
            Self::Yaml { kind, .. } | Self::Field { kind, .. } => *kind,
            Self::Empty | Self::ApiVersion { .. } | Self::Kind { .. } | Self::Duplicate { .. } => None,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    name: String,
    tenant: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    // Fields that the server adds. They are accepted and ignored, so that printed documents can be
    // applied.
    #[serde(rename = "generation")]
    _generation: Option<IgnoredAny>,
    #[serde(rename = "resourceVersion")]
    _resource_version: Option<IgnoredAny>,
    #[serde(rename = "createdAt")]
    _created_at: Option<IgnoredAny>,
    #[serde(rename = "updatedAt")]
    _updated_at: Option<IgnoredAny>,
    #[serde(rename = "updatedBy")]
    _updated_by: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SloText {
    deadline: String,
    percentile: Option<f64>,
}

/// Maximum size of the text that all aliases of a file may expand to together, in bytes.
const ALIASED_BYTES_MAX: usize = 1 << 20;

/// Parses a manifest of one or more documents.
///
/// # Errors
/// [`ManifestError`] for the first fault; the parser then returns no document of the file.
pub fn parse(text: &str) -> Result<Vec<Manifest>, ManifestError> {
    let documents: Vec<Document> =
        serde_saphyr::from_multiple_with_options(text, options(text)).map_err(|error| {
            let line = error.location().map_or(u64::MAX, |at| at.line());
            ManifestError::Yaml { kind: document::kind_at(text, line), message: yaml_fault(text, &error) }
        })?;
    let mut seen = BTreeSet::new();
    let mut manifests = Vec::with_capacity(documents.len());
    for (document, read) in (1..).zip(documents) {
        for (at, item) in read.items(SourcePosition { document, item: None })? {
            let manifest = item.check(at)?;
            let subject = manifest.subject();
            if seen.contains(&subject) {
                return Err(ManifestError::Duplicate { at, subject });
            }
            seen.insert(subject);
            manifests.push(manifest);
        }
    }
    if manifests.is_empty() {
        return Err(ManifestError::Empty);
    }
    Ok(manifests)
}

/// Returns the text of a parser's error, with its line, and with a correction where the parser knows the fields.
fn yaml_fault(text: &str, error: &serde_saphyr::Error) -> String {
    let Some(location) = error.location() else { return error.to_string() };
    let fault = match error.without_snippet() {
        serde_saphyr::Error::SerdeUnknownField { field, expected, .. } => match similar(field, expected) {
            Some(name) => format!("there is no field {field:?} here: did you mean {name:?}?"),
            None => format!("there is no field {field:?} here: the fields are {}", expected.join(", ")),
        },
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("{key:?} appears twice: remove one of the two")
        }
        error => {
            // The parser's text ends in the location, which stands at the beginning here.
            let said = error.to_string();
            let said =
                said.split(" at line ").next().unwrap_or(&said).replace("invalid u32", "not a whole number");
            let line = text.lines().nth(location.line().saturating_sub(1) as usize).unwrap_or_default();
            format!("{said}: {}", line.trim())
        }
    };
    format!("line {}, column {}: {fault}", location.line(), location.column())
}

/// Returns the name that a misspelled name most likely means.
fn similar<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    /// The least similarity of two names, from 0 to 1, at which one is proposed for the other.
    const SIMILARITY_MIN: f64 = 0.8;
    let scored = known.iter().map(|&other| (strsim::jaro(name, other), other));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|&(similarity, _)| similarity >= SIMILARITY_MIN).map(|(_, other)| other)
}

/// Returns the parser's bounds. An alias expands to the text of its anchor, so the total of text
/// and expanded aliases is limited to the length of the file plus [`ALIASED_BYTES_MAX`].
fn options(text: &str) -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_total_scalar_bytes: text.len() + ALIASED_BYTES_MAX },
        with_snippet: false,
    }
}

impl Metadata {
    fn key(&self) -> Result<FunctionKey, FieldFault> {
        let problem = |e: NameError| ("metadata", e.to_string());
        let tenant = self.tenant.as_deref().map_or(Ok(TenantName::default()), TenantName::new);
        Ok(FunctionKey {
            tenant: tenant.map_err(problem)?,
            name: FunctionName::new(&self.name).map_err(problem)?,
        })
    }

    /// Refuses the fields that only functions and workflows have.
    fn check_bare(&self) -> Result<(), FieldFault> {
        let problem = "only functions and workflows have this field: leave it out".to_owned();
        match (&self.tenant, self.labels.is_empty()) {
            (None, true) => Ok(()),
            (Some(_), _) => Err(("metadata.tenant", problem)),
            (None, false) => Err(("metadata.labels", problem)),
        }
    }
}

impl SloText {
    fn check(self) -> Result<Slo, FieldFault> {
        Ok(Slo {
            deadline: duration("spec.slo.deadline", &self.deadline)?,
            percentile: self.percentile.unwrap_or(DEFAULT_PERCENTILE),
        })
    }
}

fn timeout(text: Option<String>) -> Result<Duration, FieldFault> {
    text.map_or(Ok(DEFAULT_TIMEOUT), |text| duration("spec.timeout", &text))
}

fn duration(field: &'static str, text: &str) -> Result<Duration, FieldFault> {
    humantime::parse_duration(text).map_err(|_| {
        (field, format!("{text:?} is not a duration: write a number with ms, s, m or h, such as 50ms or 2s"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
