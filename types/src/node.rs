//! The scheduling state of a node. The replicated state reports it, and the placement planner reads
//! it.

/// Maximum number of functions that are placed on a node. A node's desired state and its reports
/// have an item for each function, so the number bounds both.
pub const FUNCTIONS_PER_NODE_MAX: usize = 32_000;

/// The scheduling state of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// The node accepts new functions.
    Schedulable,
    /// The node keeps its functions and accepts no new ones.
    Cordoned,
    /// The functions of the node are moved to other nodes.
    Draining,
    /// The node is lost. If the node returns before its functions were replaced, its placements
    /// count again.
    Lost,
}
