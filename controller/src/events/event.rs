//! An event of the cluster.

/// Whether an event needs an operator's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    Normal,
    Warning,
}

/// A change of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) severity: Severity,
    /// The stable reason, in CamelCase.
    pub(crate) reason: &'static str,
    /// The object that changed, such as `node/worker-1`.
    pub(crate) object: String,
    /// The description for people.
    pub(crate) message: String,
}
