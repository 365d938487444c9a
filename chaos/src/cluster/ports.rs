//! Free ports for processes that are killed and restarted at the same address. The ports are below
//! the range of the system's ephemeral ports, so that no other process gets such a port while its
//! owner is down.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;

use anyhow::bail;

const RANGE: Range<u16> = 20_000..32_000;
/// Distance between the first ports of two harnesses with consecutive pids.
const STRIDE: u32 = 64;

/// An allocator of ports that were free a moment ago; no port is returned twice.
#[derive(Debug)]
pub(super) struct PortAllocator {
    next: u16,
    left: u16,
}

impl PortAllocator {
    /// Starts at an offset that depends on the pid of this process.
    pub(super) fn new() -> Self {
        let span = u32::from(RANGE.end - RANGE.start);
        let offset = std::process::id().wrapping_mul(STRIDE) % span;
        Self { next: RANGE.start + u16::try_from(offset).unwrap_or(0), left: RANGE.end - RANGE.start }
    }

    pub(super) fn free(&mut self) -> anyhow::Result<SocketAddr> {
        while self.left > 0 {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.next));
            self.left -= 1;
            self.next = if self.next + 1 == RANGE.end { RANGE.start } else { self.next + 1 };
            if TcpListener::bind(address).is_ok() {
                return Ok(address);
            }
        }
        bail!("no port from {} to {} is free", RANGE.start, RANGE.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_returned_twice_or_while_it_is_bound() {
        let mut ports = PortAllocator::new();
        let first = ports.free().unwrap();
        let _taken = TcpListener::bind(first).unwrap();
        let second = PortAllocator::new().free().unwrap();
        assert_ne!(first, second);
        assert_ne!(ports.free().unwrap(), first);
    }
}
