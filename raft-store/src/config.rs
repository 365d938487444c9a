//! The type configuration of openraft.

use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

use openraft::RaftTypeConfig;
use openraft::impls::{OneshotResponder, TokioRuntime};

use crate::machine::StateMachine;
use crate::raft_ids::{GroupMember, RaftId};
use crate::snapshot::SnapshotFile;

/// The type configuration of the controllers' Raft group.
pub type ClusterConfig = TypeConfig<millrace_cluster_state::State>;

/// A log entry: a batch of commands, a membership, or nothing.
pub type Entry<M> = openraft::Entry<TypeConfig<M>>;

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
