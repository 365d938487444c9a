//! A user-space TCP proxy in front of the processes of a cluster, which cuts and slows the links
//! between them, because many kernels have no netem. The proxy identifies the connecting process by
//! its address, if each process has its own. Processes on loopback share an address, and are
//! identified by the connection's socket, in /proc.
//!
//! ```text
//!   controller 1 ──► front of controller 2 ──► controller 2
//!        (found by its pid)   │ rules: 1 to 2 cut | slow
//! ```
//! A cut link drops nothing and reports nothing: bytes wait, as under TCP while packets are
//! lost. When the link is restored, the bytes are delivered or the connection is reset ([`RestoreMode`]).
//! A cut may affect one direction alone.

mod owner;
mod pump;
mod rules;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::proxy::rules::LinkRules;
pub use crate::proxy::rules::{CutDirection, LinkParty, LinkSlowness, RestoreMode};

/// Maximum number of connections through a front at a time; further connections wait to be accepted.
const CONNECTIONS_MAX: usize = 512;

/// The links of a cluster, which clones share.
#[derive(Debug, Clone)]
pub struct ProxyNetwork {
    rules: Arc<watch::Sender<LinkRules>>,
    /// The address of the proxies.
    at: Ipv4Addr,
    /// The owner of each process id.
    pids: Arc<Mutex<BTreeMap<u32, LinkParty>>>,
    /// The owner of each address, if each process has its own.
    residents: Arc<Mutex<BTreeMap<IpAddr, LinkParty>>>,
    /// Number of connections that a cut holds now.
    held: Arc<watch::Sender<usize>>,
    /// Number of connections so far.
    connections: Arc<AtomicU64>,
}

/// A listener in front of one party, which ends with its connections when the value is dropped.
#[derive(Debug)]
pub struct ProxyListener {
    /// The address to which other processes connect.
    pub address: SocketAddr,
    accepting: AbortHandle,
}

impl Drop for ProxyListener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl ProxyNetwork {
    /// Creates a network without parties, whose proxies are at an address.
    #[must_use]
    pub fn on(at: Ipv4Addr) -> Self {
        let rules = watch::Sender::new(LinkRules::default());
        let held = watch::Sender::new(0);
        Self {
            rules: Arc::new(rules),
            at,
            pids: Arc::default(),
            residents: Arc::default(),
            held: Arc::new(held),
            connections: Arc::default(),
        }
    }

    /// Registers the owner of an address. Loopback addresses are ignored, because processes share
    /// them.
    pub fn register_address(&self, at: IpAddr, party: LinkParty) {
        if !at.is_loopback() {
            self.residents.lock().unwrap_or_else(PoisonError::into_inner).insert(at, party);
        }
    }

    /// Registers the owner of a process. An unregistered process is [`LinkParty::Outside`], to which no
    /// rule applies.
    pub fn register_process(&self, pid: u32, party: LinkParty) {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).insert(pid, party);
    }

    /// Returns every registered process that was not forgotten. A process may have ended meanwhile.
    #[must_use]
    pub fn registered_processes(&self) -> BTreeMap<u32, LinkParty> {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Removes a process that has ended.
    pub fn forget(&self, pid: u32) {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
    }

    /// Cuts every link between the two sides; `way` is the direction as seen from `one`.
    pub fn cut(&self, one: &[LinkParty], other: &[LinkParty], way: CutDirection) {
        self.rules.send_modify(|rules| rules.cut(one, other, way));
    }

    /// Slows every link between these parties, in both directions.
    pub fn slow(&self, among: &[LinkParty], slowness: LinkSlowness) {
        self.rules.send_modify(|rules| rules.slow(among, slowness));
    }

    /// Removes every cut and delay.
    pub fn mend(&self, how: RestoreMode) {
        self.rules.send_modify(|rules| rules.mend(how));
    }

    /// Returns the present cuts: data from the first party of a pair does not reach the second.
    #[must_use]
    pub fn cuts(&self) -> Vec<(LinkParty, LinkParty)> {
        self.rules.borrow().cuts()
    }

    /// Opens a front for the party that listens at `target`, now or later.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn front(&self, party: LinkParty, target: SocketAddr) -> anyhow::Result<ProxyListener> {
        let listener = TcpListener::bind((self.at, 0)).await.context("no port for a proxy")?;
        let address = listener.local_addr().context("a listener has an address")?;
        let accepting = tokio::spawn(accept(self.clone(), party, listener, target)).abort_handle();
        Ok(ProxyListener { address, accepting })
    }

    fn owner_of(&self, peer: SocketAddr, front: SocketAddr) -> LinkParty {
        let residents = self.residents.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(party) = residents.get(&peer.ip()) {
            return party.clone();
        }
        let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let owner = owner::pid_of(peer, front, pids.keys().copied());
        owner.and_then(|pid| pids.get(&pid).cloned()).unwrap_or(LinkParty::Outside)
    }
}

async fn accept(network: ProxyNetwork, to: LinkParty, listener: TcpListener, target: SocketAddr) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        // The accept fails if there are no descriptors, or if the connection was closed at once.
        // Further connections may follow.
        let Ok((stream, peer)) = listener.accept().await else { continue };
        while connections.try_join_next().is_some() {}
        let network = network.clone();
        let to = to.clone();
        connections.spawn(async move {
            carry(&network, &to, stream, peer, target).await;
            drop(place);
        });
    }
}

/// Carries a connection to its end.
async fn carry(
    network: &ProxyNetwork,
    to: &LinkParty,
    near: TcpStream,
    peer: SocketAddr,
    target: SocketAddr,
) {
    let Ok(front) = near.local_addr() else { return };
    let from = network.owner_of(peer, front);
    let link = pump::ProxyLink::new(
        network.rules.subscribe(),
        &network.held,
        from,
        to.clone(),
        network.connections.fetch_add(1, Ordering::Relaxed),
    );
    // A handshake crosses the link in both directions.
    if link.open().await.is_err() || link.reversed().open().await.is_err() {
        return;
    }
    // No process listens at the target now. Returning closes the connection, which tells the
    // caller.
    let Ok(far) = TcpStream::connect(target).await else { return };
    pump::both(link, near, far).await;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::clock;

    /// A server that returns every byte, and counts its connections.
    struct Echo {
        address: SocketAddr,
        came: Arc<AtomicUsize>,
    }

    async fn echo() -> Echo {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let came = Arc::new(AtomicUsize::new(0));
        let counted = came.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    tokio::io::copy(&mut read, &mut write).await
                });
            }
        });
        Echo { address, came }
    }

    /// Returns a network in which this process is controller 1 and an echo server is controller 2.
    async fn stage() -> (ProxyNetwork, ProxyListener, Echo) {
        let network = ProxyNetwork::on(Ipv4Addr::LOCALHOST);
        let echo = echo().await;
        network.register_process(std::process::id(), LinkParty::Controller(1));
        let front = network.front(LinkParty::Controller(2), echo.address).await.unwrap();
        (network, front, echo)
    }

    async fn answers(stream: &mut TcpStream) -> bool {
        let mut byte = [0];
        stream.write_all(b"x").await.is_ok() && stream.read_exact(&mut byte).await.is_ok()
    }

    async fn until_held(network: &ProxyNetwork, count: usize) {
        network.held.subscribe().wait_for(|&held| held == count).await.unwrap();
    }

    #[tokio::test]
    async fn an_open_link_carries_data_both_ways() {
        let (_network, front, _echo) = stage().await;
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        assert!(answers(&mut stream).await);
    }

    #[tokio::test]
    async fn a_cut_holds_new_and_old_connections_until_the_link_is_restored() {
        let (network, front, echo) = stage().await;
        let mut old = TcpStream::connect(front.address).await.unwrap();
        assert!(answers(&mut old).await);
        network.cut(&[LinkParty::Controller(1)], &[LinkParty::Controller(2)], CutDirection::Both);
        let mut new = TcpStream::connect(front.address).await.unwrap();
        new.write_all(b"x").await.unwrap();
        old.write_all(b"x").await.unwrap();
        until_held(&network, 2).await;
        assert_eq!(echo.came.load(Ordering::SeqCst), 1);
        network.mend(RestoreMode::Resume);
        let mut byte = [0];
        for stream in [&mut old, &mut new] {
            stream.read_exact(&mut byte).await.unwrap();
        }
        until_held(&network, 0).await;
    }

    #[tokio::test]
    async fn a_mend_with_reset_closes_held_connections() {
        let (network, front, _echo) = stage().await;
        let mut old = TcpStream::connect(front.address).await.unwrap();
        assert!(answers(&mut old).await);
        network.cut(&[LinkParty::Controller(2)], &[LinkParty::Controller(1)], CutDirection::Both);
        old.write_all(b"x").await.unwrap();
        until_held(&network, 1).await;
        network.mend(RestoreMode::Reset);
        assert!(!answers(&mut old).await);
        let mut new = TcpStream::connect(front.address).await.unwrap();
        assert!(answers(&mut new).await);
    }

    #[tokio::test]
    async fn a_cut_between_others_holds_nothing() {
        let (network, front, _echo) = stage().await;
        network.cut(&[LinkParty::Controller(3)], &[LinkParty::Controller(2)], CutDirection::Both);
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        assert!(answers(&mut stream).await);
    }

    #[tokio::test]
    async fn a_cut_of_one_direction_lets_the_other_pass() {
        let (network, front, echo) = stage().await;
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        assert!(answers(&mut stream).await);
        network.cut(&[LinkParty::Controller(1)], &[LinkParty::Controller(2)], CutDirection::In);
        stream.write_all(b"x").await.unwrap();
        // The request has arrived, and the cut holds the answer.
        until_held(&network, 1).await;
        let mut new = TcpStream::connect(front.address).await.unwrap();
        new.write_all(b"x").await.unwrap();
        until_held(&network, 2).await;
        assert_eq!(echo.came.load(Ordering::SeqCst), 1);
        network.mend(RestoreMode::Resume);
        let mut byte = [0];
        for stream in [&mut stream, &mut new] {
            stream.read_exact(&mut byte).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_delay_counts_each_way() {
        let (network, front, _echo) = stage().await;
        let by = Duration::from_millis(30);
        network.slow(
            &[LinkParty::Controller(1), LinkParty::Controller(2)],
            LinkSlowness { delay: by, ..LinkSlowness::default() },
        );
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        let begun = clock::now();
        assert!(answers(&mut stream).await);
        assert!(clock::now() - begun >= by * 2);
    }

    #[tokio::test]
    async fn a_front_without_a_listening_process_closes_the_connection() {
        let (network, _front, _echo) = stage().await;
        let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
        let front = network.front(LinkParty::Controller(2), gone).await.unwrap();
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        assert!(!answers(&mut stream).await);
    }
}
