//! The replicated state of the cluster, and how each command changes the state.
//!
//! ```text
//!   Proposal { stamp, caller, idempotency, command }        from the log, in order
//!        │
//!        ▼
//!   State::apply(index, &proposal) -> Result<CommandEffect, CommandRefusal>
//!        │   clock = max(clock, stamp); a repeated idempotency key answers as before
//!        ▼
//!   commands/<one file per command>      check everything, then change
//! ```
//!
//! [`State::apply`] is pure and deterministic. The method reads its arguments and nothing else, so the same
//! log gives the same bytes on every controller. This crate has no clock (the leader stamps the
//! time into the proposal), no randomness, no I/O, and no iteration in an order that could differ.
//!
//! Maps are persistent, so cloning a [`State`] costs a few reference counts. Snapshots, readers and
//! dry runs each take a clone.
//!
//! | module | holds |
//! |---|---|
//! | [`command`] | [`Proposal`] and [`StateCommand`]: the contents of the log |
//! | [`outcome`] | [`CommandEffect`] and [`CommandRefusal`]: the answer to a command |
//! | [`quota`] | bounds on the state, in items and bytes |
//! | [`apply_set`] | the dry run of several functions and workflows as one |
//! | [`record`] | stored functions, workflows, artifacts, nodes, placements, tenants and policies |
//! | [`workflows`] | whether a workflow fits the models that it runs, and the effect of a change of those models |
//! | [`checkpoint`] | the soft state that a node reported |
//! | [`index`] | tier 2 of the data index: the holders of each piece of data, and the lost data |
//! | [`rules`] | the version of the rules that is in force, and the versions that a build knows |
//! | [`operations`] | long-running operations: drains, profiles, changes of the controller group |
//! | [`invariants`] | conditions that hold after every command |
//! | [`snapshot`] | a state as bytes, with a format version |
//! | [`packed`] | MessagePack of disks and other processes, with bounded nesting |

mod accounts;
mod apply;
pub mod apply_set;
mod caller;
pub mod checkpoint;
pub mod command;
mod commands;
mod context;
pub mod index;
pub mod invariants;
mod operation_record;
pub mod operations;
pub mod outcome;
pub mod packed;
mod placements;
pub mod quota;
pub mod record;
pub mod rules;
mod sessions;
pub mod snapshot;
mod soft_invariants;
mod soft_state;
mod state;
mod table;
mod time;
mod workflow_invariants;
pub mod workflows;

pub use accounts::{BillAccount, FORGOTTEN_TENANTS_MAX, FunctionScore};
pub use apply_set::{ApplySet, SetItem, SetRefusal, SetStep};
pub use caller::{CallerName, IdempotencyKey};
pub use checkpoint::{CheckpointCoverage, NodeCheckpoint, ReplicaScore};
pub use command::{NodeSlice, Proposal, StateCommand};
pub use index::{DataLocation, LOST_ENTRIES_MAX};
pub use invariants::InvariantViolation;
pub use operation_record::OperationRecord;
pub use operations::{OPERATION_LIFE_MAX, OPERATION_TTL, OPERATIONS_MAX};
pub use outcome::{CommandEffect, CommandOutcome, CommandRefusal};
pub use placements::{PLACEMENTS_MAX, first_key};
pub use record::{
    Artifact, ClusterRecord, ControllerId, FunctionRecord, ModelKind, ModelSummary, NodeGpu, NodeRecord,
    NodeStatus, PlacementReason, PlacementRecord, PolicyRecord, REVISIONS_SERVED, RevisionRecord,
    SchedulingState, SliceRecord, TenantRecord, WorkflowRecord,
};
pub use rules::{KnownRules, RulesVersion, UnknownRules};
pub use sessions::{SESSION_TTL, SESSIONS_MAX};
pub use snapshot::{DecodeError, FORMAT};
pub use state::{
    ARTIFACTS_MAX, CLUSTER_VERSION, FUNCTIONS_MAX, NODES_MAX, POLICIES_KEPT, RETIRED_MAX, REVISIONS_KEPT,
    State, TENANTS_MAX, WORKFLOWS_MAX, WORKFLOWS_PER_TENANT_MAX,
};
pub use time::UnixMillis;
pub use workflows::USERS_NAMED_MAX;
