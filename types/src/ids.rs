//! Names and identifiers. Each is a type of its own, so that the compiler tells them apart.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Maximum length of the name of a tenant, function or node, in bytes.
pub const NAME_LEN_MAX: usize = 63;

/// The error for a name that breaks the rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} name {name:?} is not valid: use 1 to {NAME_LEN_MAX} lower-case letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
)]
pub struct NameError {
    /// The kind of the name: "function", "tenant" or "node".
    pub what: &'static str,
    /// The refused name.
    pub name: String,
}

fn check_name(what: &'static str, name: &str) -> Result<(), NameError> {
    let edge = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = name.as_bytes();
    let valid = (1..=NAME_LEN_MAX).contains(&bytes.len())
        && bytes.first().copied().is_some_and(edge)
        && bytes.last().copied().is_some_and(edge)
        && bytes.iter().all(|&c| edge(c) || matches!(c, b'-' | b'_' | b'.'));
    if valid { Ok(()) } else { Err(NameError { what, name: name.to_owned() }) }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Arc<str>);

        impl $type {
            /// Checks a name and creates the value.
            ///
            /// # Errors
            /// [`NameError`] if the name is empty, is too long or has characters that are not
            /// allowed.
            pub fn new(name: &str) -> Result<Self, NameError> {
                check_name($what, name)?;
                Ok(Self(Arc::from(name)))
            }

            /// Returns the name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl FromStr for $type {
            type Err = NameError;
            fn from_str(name: &str) -> Result<Self, NameError> {
                Self::new(name)
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;
            fn try_from(name: String) -> Result<Self, NameError> {
                Self::new(&name)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> String {
                name.0.as_ref().to_owned()
            }
        }
    };
}

name_type!(
    /// The tenant that owns a resource. Every resource's key begins with a tenant.
    TenantName, "tenant"
);
name_type!(
    /// A function's name, unique within its tenant.
    FunctionName, "function"
);
name_type!(
    /// A worker machine's name, unique in the cluster.
    NodeName, "node"
);

impl Default for TenantName {
    /// The tenant of requests that name no tenant.
    fn default() -> Self {
        Self(Arc::from("default"))
    }
}

/// A function's cluster-wide key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FunctionKey {
    /// The tenant that owns the function.
    pub tenant: TenantName,
    /// The name, unique within the tenant.
    pub name: FunctionName,
}

impl fmt::Display for FunctionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.name)
    }
}

/// An immutable version of a function, counted from 1. The Open Inference Protocol calls a revision
/// a model version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(pub NonZeroU64);

impl Revision {
    /// The first revision of a function.
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// Returns the number of the revision that follows this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Creates a revision from its number; `None` for 0.
    #[must_use]
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    /// Returns the revision's number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A revision's cluster-wide key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RevisionKey {
    /// The key of the function.
    pub function: FunctionKey,
    /// The revision of the function.
    pub revision: Revision,
}

impl fmt::Display for RevisionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.function, self.revision)
    }
}

macro_rules! number_type {
    ($(#[$doc:meta])* $type:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $type(pub $inner);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_type!(
    /// The number that Raft assigns to a node at each registration. A message with an older epoch
    /// is ignored.
    Epoch(u64)
);
number_type!(
    /// The number of an executor process's start, unique within a worker process.
    Incarnation(u64)
);
number_type!(
    /// A GPU's position on its node, from 0.
    GpuIndex(u32)
);
number_type!(
    /// A worker's number for a model, dense and assigned when the worker first prepares the model's
    /// artifact. Two functions with the same artifact share a number. The number has no meaning on
    /// another worker.
    ModelId(u32)
);

/// A request's cluster-wide id: the client's own, or else an id that the gateway generates.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// Maximum length of an id that a client may send, in bytes.
    pub const LEN_MAX: usize = 128;

    /// Creates an id from 1 to [`Self::LEN_MAX`] visible ASCII characters. Returns `None` for any
    /// other text.
    #[must_use]
    pub fn new(id: &str) -> Option<Self> {
        let valid = (1..=Self::LEN_MAX).contains(&id.len()) && id.bytes().all(|c| c.is_ascii_graphic());
        valid.then(|| Self(Arc::from(id)))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The permanent id of a cluster, by which the processes of another cluster are refused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClusterId(pub Arc<str>);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_names_are_refused() {
        for good in ["a", "digits", "resnet50", "bert-qa.v2", "a_b", &"x".repeat(63)] {
            assert!(FunctionName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a b", "ä", "a/b", "../x", ".", &"x".repeat(64)] {
            assert!(FunctionName::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_malformed_name_cannot_be_deserialized() {
        assert!(serde_saphyr::from_str::<FunctionName>("\"../x\"").is_err());
    }

    #[test]
    fn empty_long_and_unprintable_request_ids_are_refused() {
        assert!(RequestId::new("01J-abc").is_some());
        for bad in ["", "a b", "a\nb", &"x".repeat(129)] {
            assert!(RequestId::new(bad).is_none(), "{bad:?}");
        }
    }
}
