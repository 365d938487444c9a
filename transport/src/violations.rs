//! Counts violations by client address, and decides which addresses are served by threads of low priority.
//!
//! A violation is behaviour that a well-behaved client does not show. The client connects and stays
//! silent, opens more connections than its cap, breaks the protocol, or does not read its responses.
//!
//! An address with many violations in a short time is *distrusted*: [low priority
//! threads](crate::priority) serve its new connections, so that they delay other requests as little
//! as the operating system can arrange. A distrusted address is never refused. Clients behind a
//! shared address translator therefore lose only speed, and only while the processors are fully used.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::port_limits::{PortLimits, counted_as};

/// Violations after which an address is distrusted, if none is forgotten in the meantime.
const VIOLATIONS_FREE: u32 = 8;
/// Time in which a single violation is forgotten.
const FORGOTTEN_EVERY: Duration = Duration::from_secs(10);
/// Most violations that are remembered. The bound makes an address trusted again a minute after its
/// last violation.
const VIOLATIONS_MAX: u32 = VIOLATIONS_FREE + 6;
/// Most addresses whose violations are remembered.
const ADDRESSES_MAX: usize = 4096;

/// Violations of all addresses on a port.
#[derive(Debug)]
pub(crate) struct PortViolations {
    limits: PortLimits,
    violations: Mutex<Violations>,
}

/// Handle to the violations of a single address on a port.
#[derive(Debug, Clone)]
pub(crate) struct AddressViolations {
    conduct: Arc<PortViolations>,
    address: IpAddr,
}

/// The violations of each address, as leaky buckets. A pure state machine: the caller passes the time.
#[derive(Debug, Default)]
struct Violations {
    /// Time at which all violations of an address are forgotten.
    forgotten_at: HashMap<IpAddr, Instant>,
}

impl Violations {
    /// Counts a violation.
    fn count(&mut self, address: IpAddr, now: Instant) {
        if self.forgotten_at.len() >= ADDRESSES_MAX && !self.forgotten_at.contains_key(&address) {
            self.forgotten_at.retain(|_, &mut forgotten_at| forgotten_at > now);
            if self.forgotten_at.len() >= ADDRESSES_MAX {
                // With this many misbehaving addresses, the priority of another address makes no difference.
                return;
            }
        }
        let forgotten_at = self.forgotten_at.entry(address).or_insert(now);
        let latest = now + FORGOTTEN_EVERY * VIOLATIONS_MAX;
        *forgotten_at = ((*forgotten_at).max(now) + FORGOTTEN_EVERY).min(latest);
    }

    fn is_distrusted(&self, address: IpAddr, now: Instant) -> bool {
        let trusted_until = now + FORGOTTEN_EVERY * VIOLATIONS_FREE;
        self.forgotten_at.get(&address).is_some_and(|&forgotten_at| forgotten_at > trusted_until)
    }
}

impl AddressViolations {
    /// Counts a violation. An address without a cap on its connections is always trusted; by default,
    /// that is loopback.
    pub(crate) fn violated(&self) {
        let Self { conduct, address } = self;
        if conduct.limits.address_max_of(*address).is_some() {
            conduct.violations().count(counted_as(*address), Instant::now());
        }
    }

    /// Whether new connections of this address are served at a low priority.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.conduct.violations().is_distrusted(counted_as(self.address), Instant::now())
    }
}

impl PortViolations {
    pub(crate) fn new(limits: PortLimits) -> Arc<Self> {
        Arc::new(Self { limits, violations: Mutex::default() })
    }

    /// Returns the handle for an address.
    pub(crate) fn of(self: &Arc<Self>, address: IpAddr) -> AddressViolations {
        AddressViolations { conduct: self.clone(), address }
    }

    fn violations(&self) -> MutexGuard<'_, Violations> {
        // Ignores a poisoned lock: a panic elsewhere cannot leave an entry half written.
        self.violations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    const NEIGHBOUR: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

    #[test]
    fn an_address_is_distrusted_after_many_violations_and_trusted_again_a_minute_later() {
        let mut violations = Violations::default();
        let start = Instant::now();
        for _ in 0..VIOLATIONS_FREE {
            violations.count(STRANGER, start);
        }
        assert!(!violations.is_distrusted(STRANGER, start));
        for _ in 0..1_000_000 {
            violations.count(STRANGER, start);
        }
        assert!(violations.is_distrusted(STRANGER, start));
        assert!(!violations.is_distrusted(NEIGHBOUR, start));
        assert!(violations.is_distrusted(STRANGER, start + Duration::from_secs(59)));
        assert!(!violations.is_distrusted(STRANGER, start + Duration::from_secs(60)));
    }

    #[test]
    fn one_violation_in_ten_seconds_is_forgiven_for_ever() {
        let mut violations = Violations::default();
        let start = Instant::now();
        for number in 0..1000 {
            let now = start + FORGOTTEN_EVERY * number;
            violations.count(STRANGER, now);
            assert!(!violations.is_distrusted(STRANGER, now));
        }
    }

    #[test]
    fn the_memory_of_addresses_is_bounded_and_old_ones_make_room() {
        let mut violations = Violations::default();
        let start = Instant::now();
        let address = |number: u32| IpAddr::V4(Ipv4Addr::from_bits(number));
        for number in 0..10_000 {
            violations.count(address(number), start);
        }
        assert_eq!(violations.forgotten_at.len(), ADDRESSES_MAX);
        violations.count(STRANGER, start + FORGOTTEN_EVERY);
        assert_eq!(violations.forgotten_at.len(), 1);
    }

    #[test]
    fn loopback_is_trusted_unless_its_connections_are_capped() {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let distrusts = |limits: PortLimits| {
            let conduct = PortViolations::new(limits).of(local);
            (0..=VIOLATIONS_MAX).for_each(|_| conduct.violated());
            conduct.is_distrusted()
        };
        assert!(!distrusts(PortLimits::new(8)));
        assert!(distrusts(PortLimits { address_max: Some(2), ..PortLimits::new(8) }));
    }
}
