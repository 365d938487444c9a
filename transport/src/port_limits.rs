//! Connection limits of a port, and the address that a connection counts for.

use std::net::{IpAddr, Ipv6Addr};

/// Divisor of the default cap per address: an address off loopback may have a quarter of a port's
/// connections.
const ADDRESS_SHARE: usize = 4;

/// Connection limits of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortLimits {
    /// Open connections. Further connections displace idle ones, or wait in the listen queue.
    pub connections_max: usize,
    /// Cap on the open connections of an address, loopback included. `None` caps each address off
    /// loopback at a quarter of `connections_max`, and does not cap loopback.
    pub address_max: Option<usize>,
}

impl PortLimits {
    /// Returns limits with `connections_max` connections and the default cap per address.
    #[must_use]
    pub const fn new(connections_max: usize) -> Self {
        Self { connections_max, address_max: None }
    }

    /// Returns the cap on the connections of this address, or `None` if the address has no cap.
    pub(crate) fn address_max_of(&self, address: IpAddr) -> Option<usize> {
        let off_loopback = !address.to_canonical().is_loopback();
        self.address_max.or_else(|| off_loopback.then(|| self.connections_max.div_ceil(ADDRESS_SHARE)))
    }
}

/// Returns the address that a connection counts for. IPv6 addresses count by their /64, because a
/// host may own the whole /64.
pub(crate) fn counted_as(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let network = address.to_bits() >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from_bits(network))
        }
        address => address,
    }
}
