//! The open connections of a port: admits new connections, and picks the idle connections to displace
//! when the port is full.
//!
//! A new connection to a full port displaces a connection without a request under way, as nginx
//! reuses idle connections. Connections that never sent a request are displaced first, the oldest of
//! them first; then the connections that are idle for the longest. Cheap idle connections of a
//! stranger therefore cannot keep other clients out.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::connection::ConnectionState;
use crate::port_limits::{PortLimits, counted_as};

/// Most connections that a single call displaces, so that a flood of new connections does not scan
/// the whole table for each of them.
const DISPLACED_AT_ONCE: usize = 64;

/// Silent connections of a capped address above which further connections wait for their opening at a
/// low priority.
const SILENT_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct ConnectionTable {
    limits: PortLimits,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    open: BTreeMap<u64, Arc<ConnectionState>>,
    by_address: HashMap<IpAddr, AddressConnections>,
    next: u64,
}

#[derive(Debug, Default)]
struct AddressConnections {
    open: usize,
    /// Open connections that have not sent their opening.
    silent: usize,
}

/// A connection's slot in the table. Dropping the value frees the slot.
#[derive(Debug)]
pub(crate) struct TableSlot {
    table: Arc<ConnectionTable>,
    number: u64,
    address: IpAddr,
    /// Whether the connection counts as silent, because its opening has not arrived.
    silent: bool,
    /// Whether the address already had [`SILENT_MAX`] silent connections when this connection was accepted.
    among_silent: bool,
}

/// Reason why a connection gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotRefusal {
    /// The address already has as many connections as its cap.
    AddressFull,
    /// All slots of the port are in use.
    PortFull,
}

impl ConnectionTable {
    pub(crate) fn new(limits: PortLimits) -> Arc<Self> {
        Arc::new(Self { limits, entries: Mutex::default() })
    }

    /// Reserves a slot for a connection from `address`, whose state is `watched`. Fails if the
    /// address is at its cap or the port is full; the caller can then [`displace`](Self::displace)
    /// idle connections.
    pub(crate) fn take(
        self: &Arc<Self>,
        address: IpAddr,
        watched: &Arc<ConnectionState>,
    ) -> Result<TableSlot, SlotRefusal> {
        let key = counted_as(address);
        let mut entries = self.entries();
        if let Some(max) = self.limits.address_max_of(address)
            && entries.by_address.get(&key).is_some_and(|connections| connections.open >= max)
        {
            return Err(SlotRefusal::AddressFull);
        }
        if entries.open.len() >= self.limits.connections_max {
            return Err(SlotRefusal::PortFull);
        }
        let number = entries.next;
        entries.next += 1;
        entries.open.insert(number, watched.clone());
        let connections = entries.by_address.entry(key).or_default();
        let capped = self.limits.address_max_of(address).is_some();
        let among_silent = capped && connections.silent >= SILENT_MAX;
        connections.open += 1;
        connections.silent += 1;
        Ok(TableSlot { table: self.clone(), number, address: key, silent: true, among_silent })
    }

    /// Asks idle connections to end, and returns their number. Connections that never had a request
    /// are chosen first, then those that are idle for the longest. Their slots are free once the
    /// connections have ended.
    pub(crate) fn displace(&self) -> usize {
        let entries = self.entries();
        let mut idle: Vec<_> = entries.open.values().filter_map(|it| Some((it.idle()?, it))).collect();
        let count = DISPLACED_AT_ONCE.min(idle.len()).min(self.limits.connections_max.div_ceil(16));
        if count == 0 {
            return 0;
        }
        idle.select_nth_unstable_by_key(count - 1, |(rank, _)| *rank);
        for (_, connection) in &idle[..count] {
            connection.displace();
        }
        count
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        // Ignores a poisoned lock: a panic elsewhere cannot leave the entries half written.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TableSlot {
    /// Whether the address has a cap, and already had many silent connections when this connection
    /// was accepted.
    pub(crate) fn is_among_silent(&self) -> bool {
        self.among_silent
    }

    /// Records that the connection's opening has arrived.
    pub(crate) fn open(&mut self) {
        if std::mem::take(&mut self.silent)
            && let Some(connections) = self.table.entries().by_address.get_mut(&self.address)
        {
            connections.silent -= 1;
        }
    }
}

impl Drop for TableSlot {
    fn drop(&mut self) {
        let mut entries = self.table.entries();
        entries.open.remove(&self.number);
        if let Some(connections) = entries.by_address.get_mut(&self.address) {
            connections.open -= 1;
            connections.silent -= usize::from(self.silent);
            if connections.open == 0 {
                entries.by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const STRANGER: &str = "192.0.2.1";

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn table(connections_max: usize) -> Arc<ConnectionTable> {
        ConnectionTable::new(PortLimits::new(connections_max))
    }

    #[tokio::test]
    async fn an_address_has_a_quarter_of_the_port_and_loopback_all_of_it() {
        let table = table(8);
        let watched = ConnectionState::new();
        let held: Vec<_> = (0..2).map(|_| table.take(ip(STRANGER), &watched).unwrap()).collect();
        assert_eq!(table.take(ip(STRANGER), &watched).unwrap_err(), SlotRefusal::AddressFull);
        let local: Vec<_> = (0..6).map(|_| table.take(ip("127.0.0.1"), &watched).unwrap()).collect();
        assert_eq!(table.take(ip("127.0.0.1"), &watched).unwrap_err(), SlotRefusal::PortFull);
        drop((held, local));
        assert!(table.take(ip(STRANGER), &watched).is_ok());
        assert!(table.entries().by_address.is_empty() && table.entries().open.is_empty());
    }

    #[tokio::test]
    async fn addresses_of_one_ipv6_network_count_together() {
        let table = table(4);
        let watched = ConnectionState::new();
        let _held = table.take(ip("2001:db8::1"), &watched).unwrap();
        assert_eq!(table.take(ip("2001:db8::2"), &watched).unwrap_err(), SlotRefusal::AddressFull);
        assert!(table.take(ip("2001:db8:0:1::2"), &watched).is_ok());
    }

    #[tokio::test]
    async fn a_new_connection_is_among_silent_when_its_address_has_many_silent_ones() {
        let table = table(1024);
        let watched = ConnectionState::new();
        let mut silent: Vec<_> =
            (0..SILENT_MAX).map(|_| table.take(ip(STRANGER), &watched).unwrap()).collect();
        assert!(!silent.iter().any(TableSlot::is_among_silent));
        assert!(table.take(ip(STRANGER), &watched).unwrap().is_among_silent());
        assert!(!table.take(ip("192.0.2.2"), &watched).unwrap().is_among_silent());
        silent[0].open();
        silent[0].open();
        assert!(!table.take(ip(STRANGER), &watched).unwrap().is_among_silent());
        drop(silent);
        assert!(table.entries().by_address.is_empty());
    }

    #[tokio::test]
    async fn connections_of_loopback_are_never_among_silent() {
        let table = table(1024);
        let watched = ConnectionState::new();
        let silent: Vec<_> =
            (0..=SILENT_MAX).map(|_| table.take(ip("127.0.0.1"), &watched).unwrap()).collect();
        assert!(!silent.iter().any(TableSlot::is_among_silent));
    }

    #[tokio::test]
    async fn a_configured_cap_applies_to_loopback_too() {
        let limits = PortLimits { address_max: Some(1), ..PortLimits::new(8) };
        let table = ConnectionTable::new(limits);
        let watched = ConnectionState::new();
        let _held = table.take(ip("127.0.0.1"), &watched).unwrap();
        assert_eq!(table.take(ip("127.0.0.1"), &watched).unwrap_err(), SlotRefusal::AddressFull);
        assert!(table.take(ip("127.0.0.2"), &watched).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn connections_without_a_request_are_displaced_before_idle_ones() {
        let table = table(32);
        let mut slots = Vec::new();
        let mut open = |asked: bool, busy: bool| {
            let watched = ConnectionState::new();
            slots.push(table.take(ip("127.0.0.1"), &watched).unwrap());
            let request = (asked || busy).then(|| watched.begin_request());
            (watched, request.filter(|_| busy))
        };
        let (idle, _) = open(true, false);
        let (busy, _request) = open(true, true);
        tokio::time::advance(Duration::from_secs(1)).await;
        let (silent, _) = open(false, false);
        tokio::time::advance(Duration::from_secs(1)).await;
        let (newer, _) = open(false, false);
        // A single call displaces a sixteenth of the port.
        assert_eq!(table.displace(), 2);
        assert!(silent.is_displaced() && newer.is_displaced());
        assert!(!idle.is_displaced() && !busy.is_displaced());
    }

    #[tokio::test]
    async fn busy_connections_are_not_displaced() {
        let table = table(1);
        let watched = ConnectionState::new();
        let _slot = table.take(ip("127.0.0.1"), &watched).unwrap();
        let _request = watched.begin_request();
        assert_eq!(table.displace(), 0);
    }
}
