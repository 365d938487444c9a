//! Layouts of GPU memory by name: who keeps the books and what pieces look like, as one choice.
//!
//! | name | books | pieces |
//! |---|---|---|
//! | `best-fit` | runs, the tightest that fits (ours) | any blocks |
//! | `partitions` | two tiers (T13) | any blocks |
//! | `two-tier` | two tiers (T13) | contiguous, of the common sizes, as in the paper |
//! | `pool` | a pool over a native allocator: Torpor-Block (§7.3) | any blocks |

use std::fmt;
use std::str::FromStr;

use super::config::{Arrangement, Config, Placement};
use crate::names::{self, UnknownName};

/// How a GPU's memory is laid out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Any free blocks, in as few runs as there are.
    #[default]
    BestFit,
    /// Partitions, in which any free blocks serve.
    Partitions,
    /// Partitions of common sizes and of buddies; each piece of a model is in one stretch.
    TwoTier,
    /// Released pieces, kept whole.
    Pool,
}

/// Every name, with what it stands for.
pub const LAYOUTS: [(&str, Layout); 4] = [
    ("best-fit", Layout::BestFit),
    ("partitions", Layout::Partitions),
    ("two-tier", Layout::TwoTier),
    ("pool", Layout::Pool),
];

impl Layout {
    /// The same sizes, laid out like this.
    #[must_use]
    pub fn of(self, sizes: Config) -> Config {
        let (arrangement, placement) = match self {
            Self::BestFit => (Arrangement::BestFit, Placement::Scattered),
            Self::Partitions => (Arrangement::Partitions, Placement::Scattered),
            Self::TwoTier => (Arrangement::Partitions, Placement::Contiguous),
            Self::Pool => (Arrangement::Pool, Placement::Scattered),
        };
        Config { arrangement, placement, ..sizes }
    }
}

impl FromStr for Layout {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("memory layout", &LAYOUTS, text)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(names::of(&LAYOUTS, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_is_read_by_the_name_it_is_shown_by() {
        for (name, layout) in LAYOUTS {
            assert_eq!((name.parse(), layout.to_string()), (Ok(layout), name.to_owned()));
        }
        let refused = "buddies".parse::<Layout>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "memory layout \"buddies\" is not known: use one of best-fit, partitions, two-tier, pool"
        );
    }

    #[test]
    fn the_default_layout_is_the_default_memory() {
        assert_eq!(Layout::default().of(Config::default()), Config::default());
    }
}
