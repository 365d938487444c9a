//! The words every other crate speaks: ids, units, tensors, topologies, function specs and the
//! stable reasons of errors. Pure data with validation; nothing here does I/O or reads a clock.
//!
//! | module | holds |
//! |---|---|
//! | [`ids`] | names and identifiers, each its own type |
//! | [`checkpoint`] | what a worker tells the leader of its soft state |
//! | [`counts`] | scores and shares, exact |
//! | [`usage`] | what a function is billed for |
//! | [`digest`] | SHA-256 content addresses |
//! | [`limits`] | the named bounds of the replicated state |
//! | [`node`] | what may be placed on a node |
//! | [`policy`] | how nodes schedule, as far as that changes while they run |
//! | [`units`] | [`Bytes`], [`BytesPerSec`], [`Timestamp`] |
//! | [`tenancy`] | what a tenant may use at most |
//! | [`tensor`] | element types and shapes of the Open Inference Protocol |
//! | [`sequences`] | what of a model is state, and which sequence of requests it is of |
//! | [`serving`] | whose requests go first, what stays on a GPU, what runs as one |
//! | [`function`] | what a function is, and the checks a spec must pass |
//! | [`workflow`] | functions joined into a graph, and the checks it must pass |
//! | [`manifest`] | the YAML a user writes, read strictly |
//! | [`topology`] | GPUs and the links between them, as data |
//! | [`reason`] | the stable reasons that errors carry |

#![warn(missing_docs)]

pub mod checkpoint;
pub mod counts;
pub mod digest;
pub mod function;
pub mod ids;
pub mod limits;
pub mod manifest;
pub mod node;
pub mod policy;
pub mod reason;
pub mod sequences;
pub mod serving;
pub mod tenancy;
pub mod tensor;
pub mod topology;
pub mod units;
pub mod usage;
pub mod workflow;

pub use checkpoint::{DataId, ModelCopy, NodeDelta, Portion, SyncBatch, SyncPart, Tier};
pub use counts::{Alpha, SloBase, SloCounts};
pub use digest::Digest;
pub use function::{FunctionSpec, Resources, Runtime, Slo};
pub use ids::{
    ClusterId, Epoch, FunctionKey, FunctionName, GpuIndex, Incarnation, ModelId, NodeName, RequestId,
    Revision, RevisionKey, TenantName,
};
pub use node::NodeState;
pub use policy::PolicySpec;
pub use reason::{Failure, Reason};
pub use sequences::{InSequence, SequenceId, Sequences};
pub use serving::{Batching, Priority, Residency, Serving};
pub use tenancy::{Quota, Share};
pub use tensor::{DataType, Dim, Given, InputError, TensorSpec, check_inputs};
pub use units::{Bytes, BytesPerSec, Timestamp};
pub use usage::Usage;
pub use workflow::WorkflowSpec;
