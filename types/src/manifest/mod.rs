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
//!   resources:               # optional, each of them
//!     gpuMemory: 64MiB
//!     sm: 12%                # of the SMs of a shared GPU; 12%..50% may be widened to 50%
//!     quotaRequest: 0.3      # of the time, guaranteed
//!     quotaLimit: 0.8        # of the time, on average never more
//!   slices: {min: 2}         # optional: with one of the last three; 1 by default
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
mod error;
mod field;
mod function;
mod kind;
mod policy;
mod program;
mod source;
mod tenant;
mod workflow;

use std::collections::BTreeSet;

pub use document::Manifest;
pub use error::{ManifestError, ManifestSubject, SourcePosition};
pub use function::FunctionManifest;
pub use kind::{API_VERSION, LIST, ManifestKind};
pub use policy::POLICY;
pub use source::ModelSource;
pub use tenant::TenantManifest;

use self::document::Document;

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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
