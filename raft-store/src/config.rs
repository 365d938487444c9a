//! The type configuration of openraft.

use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

use openraft::RaftTypeConfig;
use openraft::impls::{OneshotResponder, TokioRuntime};
use serde::{Deserialize, Serialize};

use crate::machine::StateMachine;
use crate::snapshot::SnapshotFile;

/// A [`ControllerId`](millrace_cluster_state::ControllerId) in openraft's form.
pub type RaftId = u64;
pub type StorageError = openraft::StorageError<RaftId>;
/// A position in the log: term and index. A term has a single leader, so the position does not name it.
pub type LogId = openraft::LogId<RaftId>;
/// A controller's vote: a term and a leader.
pub type Vote = openraft::Vote<RaftId>;
/// A log entry: a batch of commands, a membership, or nothing.
pub type Entry<M> = openraft::Entry<TypeConfig<M>>;
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

/// openraft's type configuration for a machine: an entry carries a batch of commands, and its
/// response has an outcome for each command, in order.
pub struct TypeConfig<M>(PhantomData<fn() -> M>);

impl<M: StateMachine> RaftTypeConfig for TypeConfig<M> {
    type D = Vec<M::Command>;
    type R = Vec<M::Outcome>;
    type NodeId = RaftId;
    type Node = GroupMember;
    type Entry = openraft::Entry<Self>;
    type SnapshotData = SnapshotFile;
    type AsyncRuntime = TokioRuntime;
    type Responder = OneshotResponder<Self>;
}

// openraft requires these traits of the marker type. Derived, they would be required of the machine
// too.
impl<M> Clone for TypeConfig<M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M> Copy for TypeConfig<M> {}
impl<M> Default for TypeConfig<M> {
    fn default() -> Self {
        Self(PhantomData)
    }
}
impl<M> fmt::Debug for TypeConfig<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TypeConfig")
    }
}
impl<M> PartialEq for TypeConfig<M> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl<M> Eq for TypeConfig<M> {}
impl<M> PartialOrd for TypeConfig<M> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<M> Ord for TypeConfig<M> {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}
