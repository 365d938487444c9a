//! The order in which models are evicted (L22). The properties of a model give its [`EvictionRank`]; of
//! equal ranks the least recently used model is evicted first. No policy evicts a model that runs,
//! or that is being copied to or from this GPU. A model that the Gpu core protects (L22) is
//! evicted only if evicting all others does not free enough memory.
//!
//! | name | first to last |
//! |---|---|
//! | `lru` | all alike |
//! | `replicas` | replicas, the rest; ours: half of `torpor`, to measure the two halves separately |
//! | `torpor` | replicas, light models, medium ones, heavy ones (T24) |
//!
//! A replica is a copy of a model that another GPU of the node holds too. A single copy is the
//! original, so that two GPUs never both rely on the other's copy. The weight class of a model
//! follows from the slowdown of a run when the model is loaded at half the link's rate (T23). The
//! paper has two classes, the paper's artifact three. We use three: a single class for ResNet-50
//! and Bert-qa would evict the model that takes 134 ms to load as often as the model that takes 10
//! ms.

use std::fmt;
use std::str::FromStr;

use millrace_types::policy::EvictionName;

use crate::EvictionRank;
use millrace_core::names::{self, UnknownName};

/// The rule by which models are evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// The least recently used model first.
    Lru,
    /// Replicas first, of any weight.
    Replicas,
    /// Replicas first, then light, medium and heavy models (T24).
    #[default]
    Torpor,
}

/// Every name with its policy.
pub const EVICTIONS: [(&str, Eviction); 3] =
    [("lru", Eviction::Lru), ("replicas", Eviction::Replicas), ("torpor", Eviction::Torpor)];

/// The properties of a model on a GPU that decide on its eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EvictionCandidate {
    /// Whether this copy is the original or a replica.
    pub copy: CopyKind,
    /// The cost to others of loading the model again.
    pub weight: LoadInterference,
}

/// The role of a copy of a model on the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// The one copy among the node's GPUs that does not count as a replica. It may be evicted too.
    #[default]
    Original,
    /// A copy beside the original.
    Replica,
}

/// The degree to which loading a model disturbs others (T23).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LoadInterference {
    /// Loading disturbs others hardly.
    Light,
    /// Loading disturbs others a little.
    Medium,
    /// Loading disturbs others much, or the effect is unknown.
    #[default]
    Heavy,
}

impl Eviction {
    /// Returns the rank of a candidate: lower ranks are evicted first.
    #[must_use]
    pub fn rank(self, candidate: EvictionCandidate) -> EvictionRank {
        EvictionRank(match (self, candidate.copy, candidate.weight) {
            (Self::Lru, ..) | (_, CopyKind::Replica, _) => 0,
            (Self::Replicas, CopyKind::Original, _) => 1,
            (Self::Torpor, CopyKind::Original, LoadInterference::Light) => 1,
            (Self::Torpor, CopyKind::Original, LoadInterference::Medium) => 2,
            (Self::Torpor, CopyKind::Original, LoadInterference::Heavy) => 3,
        })
    }

    /// Returns the policy that an operator named.
    #[must_use]
    pub const fn named(name: EvictionName) -> Self {
        match name {
            EvictionName::Lru => Self::Lru,
            EvictionName::Replicas => Self::Replicas,
            EvictionName::Torpor => Self::Torpor,
        }
    }

    /// Whether the rank depends on the candidate. If not, the node need not report candidates.
    #[must_use]
    pub fn uses_candidates(self) -> bool {
        self != Self::Lru
    }
}

impl FromStr for Eviction {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("eviction policy", &EVICTIONS, text)
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(names::of(&EVICTIONS, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_eviction_policy_is_parsed_from_the_displayed_name() {
        for (name, policy) in EVICTIONS {
            assert_eq!((name.parse(), policy.to_string()), (Ok(policy), name.to_owned()));
        }
        for &name in EvictionName::ALL {
            assert_eq!(Eviction::named(name).to_string(), name.name());
        }
        assert_eq!(Eviction::default(), Eviction::Torpor);
        let refused = "fifo".parse::<Eviction>().unwrap_err().to_string();
        assert_eq!(refused, "eviction policy \"fifo\" is not known: use one of lru, replicas, torpor");
    }
}
