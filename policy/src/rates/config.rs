//! How bandwidth is shared, by name.

use std::fmt;
use std::str::FromStr;

use crate::names::{self, UnknownName};

/// Who gets how much of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Sharing {
    /// By service objective: everyone the rate that it needs, the tightest what is idle
    /// (`FaaSTube` §6.1).
    #[default]
    FaasTube,
    /// Equal shares of each link, as PCIe itself shares (`FaaSTube`-PS, §9.2.2).
    Fair,
    /// All there is to whoever came first.
    Fifo,
}

/// Every name, with what it stands for.
pub const SHARINGS: [(&str, Sharing); 3] =
    [("faastube", Sharing::FaasTube), ("fair", Sharing::Fair), ("fifo", Sharing::Fifo)];

impl FromStr for Sharing {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("transfer sharing", &SHARINGS, text)
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(names::of(&SHARINGS, self))
    }
}

/// How links are shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Config {
    /// Who gets how much.
    pub sharing: Sharing,
}
