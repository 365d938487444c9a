//! What a document can be about.

/// A document's `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A function.
    Function,
    /// A workflow.
    Workflow,
    /// What a tenant may use.
    Tenant,
    /// How nodes schedule.
    Policy,
}

impl Kind {
    /// All that this build reads.
    pub const ALL: [Self; 4] = [Self::Function, Self::Workflow, Self::Tenant, Self::Policy];

    /// The word in manifests.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Function => "Function",
            Self::Workflow => "Workflow",
            Self::Tenant => "Tenant",
            Self::Policy => "Policy",
        }
    }

    /// The kind of that word, if there is one.
    pub(super) fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == word)
    }
}
