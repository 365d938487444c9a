//! Prewarming hints that wait for a GPU, and counts of their outcomes.

use millrace_types::{ModelId, Timestamp};

/// Outcomes of prewarming hints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrewarmCounts {
    /// Loads that were sent to a GPU.
    pub brought: u64,
    /// Hints for a model that a GPU held or that a request had already asked for.
    pub there: u64,
    /// Hints that were dropped because no GPU had time or memory, or because requests waited.
    pub busy: u64,
}

/// Prewarming hint for a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingPrewarm {
    pub(super) model: ModelId,
    pub(super) after: Option<ModelId>,
    pub(super) until: Timestamp,
}
