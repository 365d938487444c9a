//! The faults of a refused manifest, and their position in the file.

use std::fmt;

use super::kind::{API_VERSION, LIST, ManifestKind};
use crate::ids::{FunctionKey, TenantName};

/// The position of a document or item in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourcePosition {
    /// The number of the document, from 1.
    pub document: usize,
    /// The number of the item, from 1, if the document is a list.
    pub item: Option<usize>,
}

impl fmt::Display for SourcePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}", self.document)?;
        self.item.map_or(Ok(()), |item| write!(f, ", item {item}"))
    }
}

/// The resource that a document declares; unique within a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ManifestSubject {
    /// A function or a workflow, which share a namespace.
    Model(FunctionKey),
    /// The caps on a tenant.
    Tenant(TenantName),
    /// The scheduling policy of the cluster.
    Policy,
}

impl fmt::Display for ManifestSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model(key) => write!(f, "{key}"),
            Self::Tenant(name) => write!(f, "tenant {name}"),
            Self::Policy => f.write_str("the policy"),
        }
    }
}

/// The fault of a refused manifest.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// The file has no documents.
    #[error("the file has no documents: start with 'apiVersion: {API_VERSION}' and 'kind: Function'")]
    Empty,
    /// The file is not YAML, or has a key or value outside the schema.
    #[error("{message}")]
    Yaml {
        /// The kind of the document, if it can be guessed.
        kind: Option<ManifestKind>,
        /// The fault and its line.
        message: String,
    },
    /// The `apiVersion` is unknown.
    #[error("{at}: apiVersion {found:?} is not known: write {API_VERSION:?}")]
    ApiVersion {
        /// The position in the file.
        at: SourcePosition,
        /// The `apiVersion` in the file.
        found: String,
    },
    /// The `kind` is unknown.
    #[error("{at}: kind {found:?} is not known: this version has {}, and {}", ManifestKind::ALL.map(ManifestKind::as_str).join(", "), LIST)]
    Kind {
        /// The position in the file.
        at: SourcePosition,
        /// The `kind` in the file.
        found: String,
    },
    /// A field has an invalid value.
    #[error("{at}, {field}: {problem}")]
    Field {
        /// The position in the file.
        at: SourcePosition,
        /// The kind of the document, if it can be applied.
        kind: Option<ManifestKind>,
        /// The field's path.
        field: &'static str,
        /// The fault and its correction.
        problem: String,
    },
    /// Two documents of the file declare the same resource.
    #[error("{at}: {subject} is in this file already: rename or remove one of the two")]
    Duplicate {
        /// The position of the second document.
        at: SourcePosition,
        /// The resource that both documents declare.
        subject: ManifestSubject,
    },
}

impl ManifestError {
    /// Returns the kind of the refused document, if known.
    #[must_use]
    pub fn kind(&self) -> Option<ManifestKind> {
        match self {
            Self::Yaml { kind, .. } | Self::Field { kind, .. } => *kind,
            Self::Empty | Self::ApiVersion { .. } | Self::Kind { .. } | Self::Duplicate { .. } => None,
        }
    }
}
