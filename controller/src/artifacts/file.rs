//! A model file by digest and size, and whether enough controllers hold it.

use std::collections::BTreeSet;

use millrace_cluster_state::Artifact;
use millrace_types::{Bytes, Digest};
use serde::{Deserialize, Serialize};

/// A file that a controller shall hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArtifactFile {
    pub(crate) digest: Digest,
    pub(crate) bytes: Bytes,
}

/// Returns the size of a majority of `voters` voters.
pub(super) fn majority(voters: usize) -> usize {
    voters / 2 + 1
}

/// Whether a majority of the voters, or the object store, holds the file.
pub(super) fn is_safe(artifact: &Artifact, voters: &BTreeSet<u64>) -> bool {
    let holding = artifact.holders.iter().filter(|holder| voters.contains(&holder.0));
    artifact.in_store() || holding.count() >= majority(voters.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_is_more_than_half() {
        let majorities: Vec<_> = (1..=5).map(majority).collect();
        assert_eq!(majorities, vec![1, 2, 2, 3, 3]);
    }
}
