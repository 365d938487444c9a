//! The origin of a write: the client, and the number that the client gave the write.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The identity of the client that asked for a write.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CallerName(pub Arc<str>);

impl fmt::Display for CallerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Makes a repeated write harmless: the repeat gets the first answer again, and changes nothing.
///
/// A client numbers its writes upward and has at most a single write in flight. A client that needs several
/// writes in flight uses several client ids.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// The client's own name, unique per [`CallerName`].
    pub client: Arc<str>,
    /// The number of this write.
    pub seq: u64,
}
