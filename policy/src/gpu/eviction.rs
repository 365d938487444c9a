//! Which models make room first (L22): what is known of a model becomes its [`Rank`], and of equal
//! ranks the least recently used goes first. Whatever the policy, what runs, is being copied from or
//! to, or is pinned does not make room.
//!
//! | name | first to last |
//! |---|---|
//! | `lru` | all alike |
//! | `replicas` | replicas, the rest; ours: half of `torpor`, to tell what its two halves are worth |
//! | `torpor` | replicas, light models, medium ones, heavy ones (T24) |
//!
//! A replica is a copy of a model that another GPU of the node has too. Of all copies one is the
//! original, so that two GPUs never take each other's for the one that stays. How heavy a model is
//! follows from what its load does to its run at half the link (T23). The paper has two classes, its
//! artifact three; we take three, because one class for ResNet-50 and Bert-qa has the one that takes
//! 134 ms to bring make room as often as the one that takes 10.

use std::fmt;
use std::str::FromStr;

use millrace_types::policy::EvictionName;

use crate::memory::Rank;
use crate::names::{self, UnknownName};

/// How models are chosen to make room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// The least recently used first.
    Lru,
    /// Replicas first, whatever they weigh.
    Replicas,
    /// Replicas first, then light models, then medium, then heavy ones (T24).
    #[default]
    Torpor,
}

/// Every name, with what it stands for.
pub const EVICTIONS: [(&str, Eviction); 3] =
    [("lru", Eviction::Lru), ("replicas", Eviction::Replicas), ("torpor", Eviction::Torpor)];

/// A model on a GPU, as far as evicting it goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Standing {
    /// Whether the node keeps the model without this copy.
    pub copy: CopyKind,
    /// What bringing it again would cost others.
    pub weight: Weight,
}

/// What a copy of a model is to the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum CopyKind {
    /// The one that stays.
    #[default]
    Original,
    /// One more.
    Replica,
}

/// How much loading a model disturbs others (T23).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Weight {
    /// Hardly.
    Light,
    /// A little.
    Medium,
    /// Much, or nobody knows.
    #[default]
    Heavy,
}

impl Eviction {
    /// How soon a model makes room.
    #[must_use]
    pub fn rank(self, standing: Standing) -> Rank {
        Rank(match (self, standing.copy, standing.weight) {
            (Self::Lru, ..) | (_, CopyKind::Replica, _) => 0,
            (Self::Replicas, CopyKind::Original, _) => 1,
            (Self::Torpor, CopyKind::Original, Weight::Light) => 1,
            (Self::Torpor, CopyKind::Original, Weight::Medium) => 2,
            (Self::Torpor, CopyKind::Original, Weight::Heavy) => 3,
        })
    }

    /// What an operator named.
    #[must_use]
    pub const fn named(name: EvictionName) -> Self {
        match name {
            EvictionName::Lru => Self::Lru,
            EvictionName::Replicas => Self::Replicas,
            EvictionName::Torpor => Self::Torpor,
        }
    }

    /// Whether it depends on how models stand: else nobody need say so.
    #[must_use]
    pub fn wants_standings(self) -> bool {
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
    fn every_policy_is_read_by_the_name_it_is_shown_by() {
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
