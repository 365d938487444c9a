//! Types that all other crates share: ids, units, tensors, topologies, function specs and the
//! stable reasons of errors. The crate is pure data with validation: nothing here does I/O or reads
//! a clock.
//!
//! | module | content |
//! |---|---|
//! | [`ids`] | names and identifiers, each a type of its own |
//! | [`checkpoint`] | checkpoints of a worker's soft state for the leader |
//! | [`compute`] | the speed of a run on a share of a GPU's SMs |
//! | [`counts`] | SLO counts and shares, exact |
//! | [`usage`] | billed usage of a function |
//! | [`digest`] | SHA-256 content addresses |
//! | [`limits`] | the named bounds of the replicated state |
//! | [`node`] | the scheduling state of a node |
//! | [`policy`] | the scheduling policy that can change while nodes run |
//! | [`units`] | [`Bytes`], [`BytesPerSec`], [`Timestamp`] |
//! | [`tenancy`] | the caps on a tenant |
//! | [`tensor`] | element types and shapes of the Open Inference Protocol |
//! | [`signature`] | the inputs and outputs of a function or workflow |
//! | [`sequences`] | state tensors of a model, and sequences of requests |
//! | [`serving`] | scheduling options of a function: priority, residency, batching |
//! | [`function`] | the specification of a function, and its checks |
//! | [`slices`] | shares of a GPU's SMs and time |
//! | [`workflow`] | functions joined into a graph, and its checks |
//! | [`manifest`] | strict parsing of the YAML that users write |
//! | [`topology`] | GPUs and the links between them, as data |
//! | [`reason`] | the stable reasons of errors |

#![warn(missing_docs)]

pub mod checkpoint;
pub mod compute;
pub mod counts;
pub mod digest;
pub mod function;
pub mod ids;
pub mod limits;
pub mod manifest;
pub mod node;
pub mod policy;
pub mod profile;
pub mod reason;
pub mod sequences;
pub mod serving;
pub mod signature;
pub mod slices;
pub mod tenancy;
pub mod tensor;
pub mod topology;
pub mod units;
pub mod usage;
pub mod workflow;

pub use checkpoint::{Alphas, DataId, MemoryTier, ModelCopy, NodeDelta, SyncBatch, SyncPart, SyncPortion};
pub use compute::{ComputeCurve, SliceCompute, SliceOnGpu};
pub use counts::{Alpha, SloBase, SloCounts};
pub use digest::Digest;
pub use function::{FunctionSpec, ResourceRequest, Runtime, Slo};
pub use ids::{
    ClusterId, Epoch, FunctionKey, FunctionName, GpuIndex, Incarnation, ModelId, NodeName, RequestId,
    Revision, RevisionKey, TenantName,
};
pub use node::NodeState;
pub use policy::PolicySpec;
pub use reason::{Failure, Reason};
pub use sequences::{InSequence, SequenceId, SequenceSpec};
pub use serving::{BatchingOptions, Priority, ResidencyOptions, SchedulingOptions};
pub use slices::{AskedSlices, Permille, SliceId, SmPercent, SmShare, Terms, UnitSet};
pub use tenancy::{Quota, ResourceShare};
pub use tensor::{DataType, Dim, InputError, RequestInput, TensorSpec, check_inputs};
pub use units::{Bytes, BytesPerSec, Timestamp};
pub use usage::Usage;
pub use workflow::WorkflowSpec;
