//! The settings of NVLink paths.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use millrace_types::policy::HostLinksName;

use millrace_core::names::{self, UnknownName};

/// Links of a route at most, by default. Three is also the longest route that the paper shows
/// (§3.2). With two links, a lone transfer on DGX-V100 gets half of the rate that the links could
/// carry; with three 84%, with four 95%, with five 100%. Yet with four transfers at once, longer
/// routes make the slowest transfer slower, because each further link is taken from other
/// transfers. `cargo bench --bench paths` prints both.
pub const HOPS_DEFAULT: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

/// Routes of each transfer with [`Selection::Ucx`]: the direct route and two through neighbours, as
/// on the four GPUs that its authors measured.
pub const UCX_ROUTES: usize = 3;

/// The settings of path selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The rule that gives links to transfers.
    pub selection: Selection,
    /// Links of a route at most; `None`: the length that a route can have,
    /// [`HOPS_MAX`](super::HOPS_MAX).
    pub hops_max: Option<NonZeroU32>,
}

impl Default for Config {
    fn default() -> Self {
        Self { selection: Selection::default(), hops_max: Some(HOPS_DEFAULT) }
    }
}

/// The rule that gives links to transfers (D20, D31).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Selection {
    /// Several paths that no other flow uses (Algorithm 1).
    #[default]
    FaasTube,
    /// The direct NVLink, or none, as MAPA does, which only places functions well.
    Direct,
    /// Always the same shortest paths, even if other flows use the paths, as multi-path UCX does.
    /// The routes that cross a link share the link fairly. Bytes are divided by the rates of idle
    /// links, as an operator would tune by hand, so a transfer is as fast as the slowest route
    /// allows.
    Ucx,
}

/// NVLinks between a GPU and the neighbour that forwards for it, at most. With two, a GPU of
/// DGX-V100 reaches all four PCIe links (D05).
pub const FORWARDS_MAX: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

/// The PCIe links over which a GPU reaches the host (D05).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum HostLinks {
    /// The GPU's own PCIe links.
    #[default]
    Own,
    /// The GPU's own PCIe links, and the PCIe links of neighbours, which forward over NVLinks.
    All,
}

/// Every name with its choice.
pub const HOST_LINKS: [(&str, HostLinks); 2] = [("own", HostLinks::Own), ("all", HostLinks::All)];

impl FromStr for HostLinks {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("choice of host links", &HOST_LINKS, text)
    }
}

impl HostLinks {
    /// Returns the rule that an operator named.
    #[must_use]
    pub const fn named(name: HostLinksName) -> Self {
        match name {
            HostLinksName::Own => Self::Own,
            HostLinksName::All => Self::All,
        }
    }
}

impl fmt::Display for HostLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(names::of(&HOST_LINKS, self))
    }
}
