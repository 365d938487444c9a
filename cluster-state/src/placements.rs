//! The nodes that have to hold each function's model, by function and by node.

use std::sync::Arc;

use imbl::{OrdMap, OrdSet};
pub use millrace_types::limits::PLACEMENTS_MAX;
use millrace_types::{FunctionKey, NodeName, TenantName};
use serde::{Deserialize, Serialize};

use crate::record::PlacementRecord;

/// Every placement. The encoded form is the list of placements; the order by node is rebuilt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredPlacements", into = "StoredPlacements")]
pub(crate) struct Placements {
    by_function: OrdMap<(FunctionKey, NodeName), Arc<PlacementRecord>>,
    by_node: OrdSet<(NodeName, FunctionKey)>,
    bytes: u64,
}

#[derive(Serialize, Deserialize)]
struct StoredPlacements(Vec<Arc<PlacementRecord>>);

impl From<StoredPlacements> for Placements {
    fn from(StoredPlacements(placements): StoredPlacements) -> Self {
        let mut all = Self::default();
        for placement in placements {
            all.insert(placement);
        }
        all
    }
}

impl From<Placements> for StoredPlacements {
    fn from(placements: Placements) -> Self {
        Self(placements.by_function.values().cloned().collect())
    }
}

impl Placements {
    pub(crate) fn insert(&mut self, placement: Arc<PlacementRecord>) {
        let function = placement.function.clone();
        let node = placement.node.clone();
        self.by_node.insert((node.clone(), function.clone()));
        self.bytes += row_bytes(&placement);
        if let Some(before) = self.by_function.insert((function, node), placement) {
            self.bytes -= row_bytes(&before);
        }
    }

    pub(crate) fn remove(&mut self, function: &FunctionKey, node: &NodeName) -> Option<Arc<PlacementRecord>> {
        self.by_node.remove(&(node.clone(), function.clone()));
        let placement = self.by_function.remove(&(function.clone(), node.clone()))?;
        self.bytes -= row_bytes(&placement);
        Some(placement)
    }

    pub(crate) fn get(&self, function: &FunctionKey, node: &NodeName) -> Option<&Arc<PlacementRecord>> {
        self.by_function.get(&(function.clone(), node.clone()))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<PlacementRecord>> {
        self.by_function.values()
    }

    /// Returns the placements of a function, by node.
    pub(crate) fn of<'a>(
        &'a self,
        function: &'a FunctionKey,
    ) -> impl Iterator<Item = &'a Arc<PlacementRecord>> + use<'a> {
        let from = (function.clone(), first_name());
        let placements = self.by_function.range(from..).map(|(_, placement)| placement);
        placements.take_while(move |placement| placement.function == *function)
    }

    /// Returns the functions placed on a node, by key.
    pub(crate) fn on<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = &'a FunctionKey> + use<'a> {
        let from = (node.clone(), FunctionKey { tenant: first_name(), name: first_name() });
        self.by_node.range(from..).take_while(move |(at, _)| at == node).map(|(_, function)| function)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_function.len()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether both orders hold the same placements under their own keys, and the byte count
    /// matches.
    pub(crate) fn is_consistent(&self) -> bool {
        self.by_function.len() == self.by_node.len()
            && self.bytes == self.by_function.values().map(|placement| row_bytes(placement)).sum::<u64>()
            && self.by_function.iter().all(|((function, node), placement)| {
                placement.function == *function
                    && placement.node == *node
                    && self.by_node.contains(&(node.clone(), function.clone()))
            })
    }
}

/// Returns the bytes of an encoded placement: its names, the names of its fields, a reason, two
/// numbers and the slices.
fn row_bytes(placement: &PlacementRecord) -> u64 {
    const AROUND: usize = 144;
    const SLICE: usize = 80;
    let PlacementRecord { function, node, slices, .. } = placement;
    let names = function.tenant.as_str().len() + function.name.as_str().len() + node.as_str().len();
    (AROUND + names + SLICE * slices.len()) as u64
}

/// Returns the first name in the order: names begin with a letter or a digit, so none sorts before
/// "0".
pub(crate) fn first_name<N: std::str::FromStr<Err: std::fmt::Debug>>() -> N {
    "0".parse().expect("a digit is a valid name")
}

/// Returns a key before which no function or workflow of the tenant sorts.
#[must_use]
pub fn first_key(tenant: &TenantName) -> FunctionKey {
    FunctionKey { tenant: tenant.clone(), name: first_name() }
}
