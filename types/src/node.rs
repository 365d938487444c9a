//! What may be placed on a node: the one word for it that the replicated state answers with and the
//! planner asks for.

/// The most functions that are placed on one node. A node's desired state and its reports have an item for
/// each, so that this bounds both.
pub const FUNCTIONS_PER_NODE_MAX: usize = 32_000;

/// What may be placed on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// It takes new functions.
    Schedulable,
    /// It keeps what it has and takes nothing new.
    Cordoned,
    /// What it has goes elsewhere.
    Draining,
    /// It is gone. What it had counts again should it come back before that was replaced.
    Lost,
}
