//! The document of an object that has a manifest: the manifest, with a `status` beside it.

use millrace_types::manifest::{API_VERSION, ManifestKind};
use serde::Serialize;

/// An object with `metadata` M, `spec` S and `status` T. The manifest parser skips the status, and
/// the fields that the server adds to the metadata and spec: see [`millrace_types::manifest`].
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ManifestDocument<M, S, T> {
    api_version: &'static str,
    kind: &'static str,
    metadata: M,
    spec: S,
    status: T,
}

impl<M, S, T> ManifestDocument<M, S, T> {
    pub(crate) fn new(kind: ManifestKind, metadata: M, spec: S, status: T) -> Self {
        Self { api_version: API_VERSION, kind: kind.as_str(), metadata, spec, status }
    }
}
