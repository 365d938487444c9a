//! The repairs of faults, in the order in which several faults are undone.

use crate::cluster::ClusterProcess;

/// The repair of a fault. The order of the variants is the order in which several faults are
/// undone: a process that hangs or is cut off cannot answer the later repairs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FaultRepair {
    /// Continues a stopped process, if the process still exists.
    Continue(u32),
    /// Takes the link of a process up again.
    Plug(ClusterProcess),
    /// Restores every link.
    Mend,
    /// Restarts an ended process over the same folder.
    Start(ClusterProcess),
    /// Lifts the memory limit of a worker, or restarts a worker that has ended.
    Feed(String),
    /// Ends all faults in the machine of a controller.
    Clear(u64),
}
