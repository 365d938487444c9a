//! The ids, positions and members of the Raft group, in openraft's form.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A [`ControllerId`](millrace_cluster_state::ControllerId) in openraft's form.
pub type RaftId = u64;
pub type StorageError = openraft::StorageError<RaftId>;
/// A position in the log: term and index. A term has a single leader, so the position does not name it.
pub type LogId = openraft::LogId<RaftId>;
/// A controller's vote: a term and a leader.
pub type Vote = openraft::Vote<RaftId>;
/// The metadata of a snapshot: the last log entry and the membership that it covers.
pub type SnapshotMeta = openraft::SnapshotMeta<RaftId, GroupMember>;
/// The membership at a log entry.
pub type StoredMembership = openraft::StoredMembership<RaftId, GroupMember>;

/// A controller's entry in the membership.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMember {
    /// The address for the other controllers, as `host:port`. Stored like openraft's own node type
    /// stores it.
    #[serde(rename = "addr")]
    pub address: String,
    /// The id of its [data directory](crate::DirectoryOwner::directory). A controller that returns with
    /// another directory lost its acknowledged writes, and is not this member. Empty for a member
    /// from before format 2.
    #[serde(default)]
    pub directory: String,
}

impl fmt::Display for GroupMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.address)
    }
}
