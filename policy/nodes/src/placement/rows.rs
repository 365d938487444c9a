//! Rows of the planner's table for functions, nodes, models and tenants, including the steps
//! planned so far.

use std::collections::BTreeMap;

use millrace_types::NodeState;
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;

use super::view::{DesiredReplicas, PlacementNode};

/// The number 1 in the fixed-point fractions of costs.
pub(super) const WHOLE: u64 = 1_000_000;
/// Failed nodes per function up to which another node is tried instead.
const FAILED_MAX: u32 = 2;

/// GPU load, in thousandths, up to which functions are grouped on a node. Above that, a request
/// waits longer for the GPU than its data would take to arrive from another node.
const LOAD_MAX: u64 = 750;

/// Planned fate of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyFate {
    /// The copy stays, or is removed as surplus.
    Stay,
    /// The copy serves, and is removed when others are ready.
    Leave,
    /// The copy's node is lost. The record stays until the copy is replaced, in case the node
    /// returns.
    Lost,
    /// The copy serves no request, and another node is tried. The record stays, with its memory, as
    /// long as the function is wanted. The record marks a node not to try again until a revision or
    /// the node improves.
    Failed,
    /// A step removes the copy.
    Gone,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct PlacedCopy {
    pub(super) node: usize,
    pub(super) ready: bool,
    pub(super) fate: CopyFate,
}

pub(super) struct FunctionRow<'a> {
    pub(super) of: &'a DesiredReplicas,
    pub(super) tenant: usize,
    pub(super) models: Vec<usize>,
    /// Number of copies that the function should have.
    pub(super) wanted: u32,
    /// Expected load of a copy.
    pub(super) load: u64,
    pub(super) copies: Vec<PlacedCopy>,
}

pub(super) struct NodeRow<'a> {
    pub(super) of: &'a PlacementNode,
    /// Bytes of the models placed on the node.
    pub(super) used: u64,
    /// Expected load of the copies placed on the node.
    pub(super) load: u64,
    /// Number of copies placed on the node.
    pub(super) copies: u64,
}

pub(super) struct ModelRow {
    pub(super) bytes: u64,
    /// Nodes that have the model, with the number of functions that share the model there.
    pub(super) holders: BTreeMap<usize, u32>,
}

pub(super) struct TenantRow {
    /// Number of copies that the tenant's functions should have.
    pub(super) wanted: u64,
    /// Number of copies that the tenant's functions have, by node.
    pub(super) copies: BTreeMap<usize, u64>,
}

impl FunctionRow<'_> {
    fn count(&self, is: impl Fn(&PlacedCopy) -> bool) -> u32 {
        u32::try_from(self.copies.iter().filter(|copy| is(copy)).count()).unwrap_or(u32::MAX)
    }

    /// Returns the copies that stay.
    pub(super) fn those_staying(&self) -> impl Iterator<Item = &PlacedCopy> {
        self.copies.iter().filter(|copy| copy.fate == CopyFate::Stay)
    }

    /// Returns the number of copies that stay.
    pub(super) fn staying(&self) -> u32 {
        self.count(|copy| copy.fate == CopyFate::Stay)
    }

    /// Returns the nodes where copies stay.
    pub(super) fn staying_on(&self) -> impl Iterator<Item = usize> {
        self.those_staying().map(|copy| copy.node)
    }

    /// Returns the number of copies that stay and serve.
    pub(super) fn ready(&self) -> u32 {
        self.count(|copy| copy.fate == CopyFate::Stay && copy.ready)
    }

    pub(super) fn leaving(&self) -> u32 {
        self.count(|copy| copy.fate == CopyFate::Leave)
    }

    pub(super) fn failed(&self) -> u32 {
        self.count(|copy| copy.fate == CopyFate::Failed)
    }

    /// Returns the number of copies to place. Failures beyond [`FAILED_MAX`] count as copies: a
    /// function that no node can prepare must not walk through the cluster.
    pub(super) fn missing(&self) -> u32 {
        self.wanted.saturating_sub(self.staying()).saturating_sub(self.failed().saturating_sub(FAILED_MAX))
    }

    /// Returns whether the node has any copy on record, even a failed or removed copy.
    pub(super) fn is_on(&self, node: usize) -> bool {
        self.copies.iter().any(|copy| copy.node == node)
    }
}

impl NodeRow<'_> {
    /// Returns whether the node takes new functions.
    pub(super) fn is_open(&self) -> bool {
        self.of.state == NodeState::Schedulable
    }

    /// Returns whether a copy that adds `added` bytes of host memory fits. An overfull node fits no
    /// copy, not even one that adds no bytes, because its present copies have to leave.
    pub(super) fn fits(&self, added: u64) -> bool {
        !self.is_full() && self.used.saturating_add(added) <= self.of.host.0
    }

    /// Returns whether the node has the maximum number of functions, although memory may be left.
    pub(super) fn is_full(&self) -> bool {
        self.copies >= FUNCTIONS_PER_NODE_MAX as u64
    }

    /// Returns the host memory that is missing after adding and freeing bytes.
    pub(super) fn lacks(&self, added: u64, freed: u64) -> u64 {
        self.used.saturating_add(added).saturating_sub(self.of.host.0.saturating_add(freed))
    }

    /// Returns the free host memory.
    pub(super) fn free(&self) -> u64 {
        self.of.host.0.saturating_sub(self.used)
    }

    /// Returns the sum of the used shares of the node's memory and of its GPUs.
    pub(super) fn fullness(&self) -> u64 {
        self.fullness_at(self.used, self.load)
    }

    pub(super) fn fullness_at(&self, used: u64, load: u64) -> u64 {
        // Computed in KiB, so that no product overflows below 16 PiB.
        let memory = (used >> 10).saturating_mul(WHOLE) / (self.of.host.0 >> 10).max(1);
        let gpus = load.saturating_mul(WHOLE / 1000) / u64::from(self.of.gpus).max(1);
        memory.saturating_add(gpus)
    }

    /// Returns the GPU time in each second up to which functions are grouped on the node.
    pub(super) fn load_max(&self) -> u64 {
        u64::from(self.of.gpus) * LOAD_MAX
    }

    /// Returns whether the node's GPUs have time for this additional load.
    pub(super) fn has_time_for(&self, load: u64) -> bool {
        self.load.saturating_add(self.unexpected()).saturating_add(load) <= self.load_max()
    }

    /// Returns the observed load of the GPUs beyond the expected load of the copies.
    pub(super) fn unexpected(&self) -> u64 {
        self.of.busy.0.saturating_sub(self.load)
    }
}
