//! The version and the kinds of documents in a manifest.

/// The only `apiVersion` this build reads.
pub const API_VERSION: &str = "millrace/v1";

/// The kind of a document that lists other documents under `items`, as `millrace get` prints them.
pub const LIST: &str = "List";

/// A document's `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManifestKind {
    /// The declaration of a function.
    Function,
    /// The declaration of a workflow.
    Workflow,
    /// The caps on a tenant.
    Tenant,
    /// The scheduling policy of the cluster.
    Policy,
}

impl ManifestKind {
    /// All kinds that this build reads.
    pub const ALL: [Self; 4] = [Self::Function, Self::Workflow, Self::Tenant, Self::Policy];

    /// Returns the word in manifests.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Function => "Function",
            Self::Workflow => "Workflow",
            Self::Tenant => "Tenant",
            Self::Policy => "Policy",
        }
    }

    /// Returns the kind with this word in manifests, if there is one.
    pub(super) fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == word)
    }
}
