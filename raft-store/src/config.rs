//! The types openraft is instantiated with.

use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

use openraft::RaftTypeConfig;
use openraft::impls::{OneshotResponder, TokioRuntime};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::snapshot::SnapshotFile;

/// A [`ControllerId`](millrace_cluster_state::ControllerId) as openraft takes it.
pub type RaftId = u64;
/// openraft's storage error.
pub type StorageError = openraft::StorageError<RaftId>;
/// A position in the log: term, leader, index.
pub type LogId = openraft::LogId<RaftId>;
/// What a controller votes for.
pub type Vote = openraft::Vote<RaftId>;
/// One log entry: a batch of commands, a membership, or nothing.
pub type Entry<M> = openraft::Entry<TypeConfig<M>>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::SnapshotMeta<RaftId, Member>;
/// The membership as of some log entry.
pub type StoredMembership = openraft::StoredMembership<RaftId, Member>;

/// What the membership keeps of each controller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Where the others reach it, as `host:port`. Stored as openraft's own node type stores it.
    #[serde(rename = "addr")]
    pub address: String,
    /// Its [data directory](crate::Identity::directory): a controller that comes back with another
    /// one lost what it promised, and is not this member. Empty for one of before format 2.
    #[serde(default)]
    pub directory: String,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.address)
    }
}

/// openraft's type configuration for a machine: an entry carries a batch of commands and is
/// answered with one outcome per command, in order.
pub struct TypeConfig<M>(PhantomData<fn() -> M>);

impl<M: Machine> RaftTypeConfig for TypeConfig<M> {
    type D = Vec<M::Command>;
    type R = Vec<M::Outcome>;
    type NodeId = RaftId;
    type Node = Member;
    type Entry = openraft::Entry<Self>;
    type SnapshotData = SnapshotFile;
    type AsyncRuntime = TokioRuntime;
    type Responder = OneshotResponder<Self>;
}

// openraft wants these of the marker itself. Derived, they would be asked of the machine too.
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
