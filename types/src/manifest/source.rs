//! The source of a function's model or program.

use super::field::FieldFault;
use crate::digest::Digest;
use crate::signature::Signature;

/// The source of a function's model or program.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelSource {
    /// A local file.
    File {
        /// The path as written, relative to the manifest.
        path: String,
        /// The inputs and outputs declared for a program. A model file declares its own.
        declared: Option<Signature>,
    },
    /// An artifact stored in the cluster under this digest.
    Cluster(Digest),
}

/// Returns the artifact of the cluster with this digest as the source.
pub(super) fn in_cluster(field: &'static str, digest: &str) -> Result<ModelSource, FieldFault> {
    let digest = digest.parse::<Digest>().map_err(|error| (field, error.to_string()))?;
    Ok(ModelSource::Cluster(digest))
}
