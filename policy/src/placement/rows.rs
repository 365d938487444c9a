//! What is known of one function, node, model or tenant, with the steps planned so far.

use std::collections::BTreeMap;

use millrace_types::NodeState;
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;

use super::view::{Function, Node};

/// One, in the integer fractions that costs are reckoned in.
pub(super) const WHOLE: u64 = 1_000_000;
/// Nodes that may fail to prepare a function until no other is tried in their place.
const FAILED_MAX: u32 = 2;

/// How busy a GPU may be, in thousandths, for functions to be put together on its node: beyond that a
/// request waits longer for the GPU than its data would take from another node.
const LOAD_MAX: u64 = 750;

/// What is to become of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It stays, or goes when it is one too many.
    Stay,
    /// It serves, and is to go when others are ready.
    Leave,
    /// Its node is lost. The record is kept until it is replaced, in case the node comes back.
    Lost,
    /// It serves nobody; another is tried. The record is kept, with its memory, for as long as the
    /// function is wanted: it says where not to try again, until a revision or the node gets better.
    Failed,
    /// A step takes it away.
    Gone,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    pub(super) node: usize,
    pub(super) ready: bool,
    pub(super) fate: Fate,
}

pub(super) struct FunctionRow<'a> {
    pub(super) of: &'a Function,
    pub(super) tenant: usize,
    pub(super) models: Vec<usize>,
    /// Copies it should have.
    pub(super) wanted: u32,
    /// Expected load of one copy.
    pub(super) load: u64,
    pub(super) copies: Vec<Copy>,
}

pub(super) struct NodeRow<'a> {
    pub(super) of: &'a Node,
    /// Bytes of the models placed there.
    pub(super) used: u64,
    /// Expected load of the copies placed there.
    pub(super) load: u64,
    /// Copies placed there.
    pub(super) copies: u64,
}

pub(super) struct ModelRow {
    pub(super) bytes: u64,
    /// Nodes that have it, and for how many functions.
    pub(super) holders: BTreeMap<usize, u32>,
}

pub(super) struct TenantRow {
    /// Copies its functions should have.
    pub(super) wanted: u64,
    /// Copies its functions have, by node.
    pub(super) copies: BTreeMap<usize, u64>,
}

impl FunctionRow<'_> {
    fn count(&self, is: impl Fn(&Copy) -> bool) -> u32 {
        u32::try_from(self.copies.iter().filter(|copy| is(copy)).count()).unwrap_or(u32::MAX)
    }

    /// The copies that stay.
    pub(super) fn those_staying(&self) -> impl Iterator<Item = &Copy> {
        self.copies.iter().filter(|copy| copy.fate == Fate::Stay)
    }

    /// How many stay.
    pub(super) fn staying(&self) -> u32 {
        self.count(|copy| copy.fate == Fate::Stay)
    }

    /// The nodes where copies stay.
    pub(super) fn staying_on(&self) -> impl Iterator<Item = usize> {
        self.those_staying().map(|copy| copy.node)
    }

    /// Copies that stay and serve.
    pub(super) fn ready(&self) -> u32 {
        self.count(|copy| copy.fate == Fate::Stay && copy.ready)
    }

    pub(super) fn leaving(&self) -> u32 {
        self.count(|copy| copy.fate == Fate::Leave)
    }

    pub(super) fn failed(&self) -> u32 {
        self.count(|copy| copy.fate == Fate::Failed)
    }

    /// Copies that are to be placed. Failures beyond [`FAILED_MAX`] count as copies: a function that
    /// no node can prepare must not walk through the cluster.
    pub(super) fn missing(&self) -> u32 {
        self.wanted.saturating_sub(self.staying()).saturating_sub(self.failed().saturating_sub(FAILED_MAX))
    }

    /// Whether any step so far or before has something of it on the node.
    pub(super) fn is_on(&self, node: usize) -> bool {
        self.copies.iter().any(|copy| copy.node == node)
    }
}

impl NodeRow<'_> {
    /// Whether it takes new functions.
    pub(super) fn is_open(&self) -> bool {
        self.of.state == NodeState::Schedulable
    }

    /// Whether one more copy fits that adds so much to its host memory. Nothing fits a node that has too much,
    /// not even what needs no more: what is there has to go.
    pub(super) fn fits(&self, added: u64) -> bool {
        !self.is_full() && self.used.saturating_add(added) <= self.of.host.0
    }

    /// Whether it has the most functions of a node, although memory may be left.
    pub(super) fn is_full(&self) -> bool {
        self.copies >= FUNCTIONS_PER_NODE_MAX as u64
    }

    /// Host memory it would have too little, with so much more and so much gone.
    pub(super) fn lacks(&self, added: u64, freed: u64) -> u64 {
        self.used.saturating_add(added).saturating_sub(self.of.host.0.saturating_add(freed))
    }

    /// Host memory left.
    pub(super) fn free(&self) -> u64 {
        self.of.host.0.saturating_sub(self.used)
    }

    /// How full it is: the share of its memory and of its GPUs that is spoken for.
    pub(super) fn fullness(&self) -> u64 {
        self.fullness_at(self.used, self.load)
    }

    pub(super) fn fullness_at(&self, used: u64, load: u64) -> u64 {
        // In KiB, so that nothing overflows below 16 PiB.
        let memory = (used >> 10).saturating_mul(WHOLE) / (self.of.host.0 >> 10).max(1);
        let gpus = load.saturating_mul(WHOLE / 1000) / u64::from(self.of.gpus).max(1);
        memory.saturating_add(gpus)
    }

    /// GPU time in each second up to which functions are put together on it.
    pub(super) fn load_max(&self) -> u64 {
        u64::from(self.of.gpus) * LOAD_MAX
    }

    /// Whether its GPUs have time for so much more.
    pub(super) fn has_time_for(&self, load: u64) -> bool {
        self.load.saturating_add(self.unexpected()).saturating_add(load) <= self.load_max()
    }

    /// What its GPUs were seen to do beyond what its copies are expected to need.
    pub(super) fn unexpected(&self) -> u64 {
        self.of.busy.0.saturating_sub(self.load)
    }
}
