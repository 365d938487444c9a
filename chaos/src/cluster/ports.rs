//! Free ports for processes that are killed and started again at the same place. Below the range
//! from which the system takes the ports of outgoing connections, so that nobody takes one while its
//! process is down.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;

use anyhow::bail;

const RANGE: Range<u16> = 20_000..32_000;
/// Two harnesses at once begin so far apart, at least.
const STRIDE: u32 = 64;

/// Hands out ports that were free a moment ago, none twice.
#[derive(Debug)]
pub(super) struct Ports {
    next: u16,
    left: u16,
}

impl Ports {
    /// Begins at a place of this process's own.
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
    fn no_port_is_given_twice_or_while_it_is_taken() {
        let mut ports = Ports::new();
        let first = ports.free().unwrap();
        let _taken = TcpListener::bind(first).unwrap();
        let second = Ports::new().free().unwrap();
        assert_ne!(first, second);
        assert_ne!(ports.free().unwrap(), first);
    }
}
