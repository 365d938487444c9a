//! The words and sizes by which tables and reports show a node.

use millrace_client::messages as wire;

/// Returns the node's host memory for models. A node without a report has its whole capacity.
pub(crate) fn host_budget(node: &wire::Node) -> u64 {
    if node.host_budget_bytes > 0 { node.host_budget_bytes } else { node.host_memory_bytes }
}

/// Formats a node's state and scheduling as `kubectl` does.
pub(crate) fn node_status(node: &wire::Node) -> String {
    let breaks = node.conditions.iter().any(|condition| condition.reason == "StreamBreaks");
    let known = match (node.status(), node.lease()) {
        (wire::NodeStatus::Lost, _) => "Lost",
        (_, wire::NodeLease::Fenced) => "Silent",
        _ if breaks => "StreamBreaks",
        _ if node.connected => "Connected",
        _ => "Disconnected",
    };
    match node.scheduling() {
        wire::NodeScheduling::Cordoned => format!("{known},Cordoned"),
        wire::NodeScheduling::Draining => format!("{known},Draining"),
        wire::NodeScheduling::Schedulable | wire::NodeScheduling::Unspecified => known.to_owned(),
    }
}
