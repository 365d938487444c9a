//! The names of the rules that share bandwidth.

use std::fmt;
use std::str::FromStr;

use millrace_types::policy::TransferSharingName;

use millrace_core::names::{self, UnknownName};

/// The rule that shares a link's bandwidth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum TransferSharing {
    /// By objective: each flow gets the rate that it needs, and the tightest flow gets the idle
    /// rest (`FaaSTube` §6.1).
    #[default]
    FaasTube,
    /// Equal shares of each link, as PCIe itself shares (`FaaSTube`-PS, §9.2.2).
    Fair,
    /// The whole link for the flow that came first.
    Fifo,
}

/// Every name with its sharing.
pub const SHARINGS: [(&str, TransferSharing); 3] = [
    ("faastube", TransferSharing::FaasTube),
    ("fair", TransferSharing::Fair),
    ("fifo", TransferSharing::Fifo),
];

impl TransferSharing {
    /// Returns the rule that an operator named.
    #[must_use]
    pub const fn named(name: TransferSharingName) -> Self {
        match name {
            TransferSharingName::Faastube => Self::FaasTube,
            TransferSharingName::Fair => Self::Fair,
            TransferSharingName::Fifo => Self::Fifo,
        }
    }
}

impl FromStr for TransferSharing {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("transfer sharing", &SHARINGS, text)
    }
}

impl fmt::Display for TransferSharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(names::of(&SHARINGS, self))
    }
}

/// The configuration of the rates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Config {
    /// The rule that shares bandwidth.
    pub sharing: TransferSharing,
}
