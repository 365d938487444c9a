//! Settings of NVLink paths.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::names::{self, UnknownName};

/// Links that a route crosses at most by default; three is also the longest that the paper shows (§3.2).
/// Two leave a lone transfer on DGX-V100 with half of what its links could carry, three with 84%, four
/// with 95%, five with all of it. Yet with four transfers at once longer routes make the slowest slower:
/// each further link is taken from others (`cargo bench --bench paths` prints both).
pub const HOPS_DEFAULT: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

/// Routes that [`Selection::Ucx`] uses for each transfer: the direct one and two through neighbours, as
/// on the four GPUs that its authors measured.
pub const UCX_ROUTES: usize = 3;

/// How NVLink paths are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// By which rule.
    pub selection: Selection,
    /// Links that a route crosses at most; `None`: as many as a route can be long,
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
    /// Several paths that nobody else uses (Algorithm 1).
    #[default]
    FaasTube,
    /// The direct NVLink, or none: MAPA, which places well and leaves it at that.
    Direct,
    /// Always the same shortest paths, whoever else uses them: multi-path UCX. The links are shared
    /// fairly between the routes that cross them. Bytes are divided by what the links would carry if
    /// idle, as one tunes it by hand, so a transfer is as fast as its slowest route lets it be.
    Ucx,
}

/// NVLinks between a GPU and the neighbour that forwards for it, at most: with two a GPU of DGX-V100
/// reaches all four PCIe links (D05).
pub const FORWARDS_MAX: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

/// Over whose PCIe links a GPU reaches the host (D05).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum HostLinks {
    /// Its own.
    #[default]
    Own,
    /// Its own and those of its neighbours, which forward over NVLinks.
    All,
}

/// Every name, with what it stands for.
pub const HOST_LINKS: [(&str, HostLinks); 2] = [("own", HostLinks::Own), ("all", HostLinks::All)];

impl FromStr for HostLinks {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("choice of host links", &HOST_LINKS, text)
    }
}

impl fmt::Display for HostLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(names::of(&HOST_LINKS, self))
    }
}
