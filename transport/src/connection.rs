//! State of a connection: the requests under way, and the time limits on its silence.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::server_config::ServerConfig;

/// The remote end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// Address of the peer, as the listener reported it.
    pub address: SocketAddr,
}

/// The state of an open connection that its watchdog judges.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    accepted: Instant,
    /// Whether the opening has arrived.
    opened: AtomicBool,
    /// Whether any request has begun so far.
    served: AtomicBool,
    /// Number of requests whose response has not been sent completely.
    under_way: AtomicUsize,
    /// Time at which the last response was sent, in milliseconds after `accepted`.
    idle_since: AtomicU64,
    displaced: AtomicBool,
    wake: Notify,
}

/// Next step of a connection's watchdog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchdogStep {
    /// The connection is within its time limits: judge it again at this time.
    LookAgainAt(Instant),
    /// The connection must end.
    End(ConnectionEnd),
}

/// Reason why the watchdog ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// The client's first bytes did not arrive in time.
    NoOpening,
    /// A request's head did not arrive in time.
    NoRequest,
    /// The connection had no request under way for too long.
    Idle,
    /// The idle connection was displaced because a new connection needed its slot.
    Displaced,
}

/// Rank of an idle connection: the connection with the smallest rank is displaced first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IdleRank {
    /// Whether the connection ever sent a request; `false` sorts first.
    pub(crate) served: bool,
    pub(crate) since: Instant,
}

impl ConnectionState {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            accepted: Instant::now(),
            opened: AtomicBool::new(false),
            served: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            idle_since: AtomicU64::new(0),
            displaced: AtomicBool::new(false),
            wake: Notify::new(),
        })
    }

    /// Records that the opening arrived. From now on, the time limit of the head applies.
    pub(crate) fn open(&self) {
        self.opened.store(true, Ordering::Relaxed);
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> RequestGuard {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        if !self.served.swap(true, Ordering::Relaxed) {
            // The idle limit replaces the limit of the head, so the watchdog must compute its deadline again.
            self.wake.notify_one();
        }
        RequestGuard(self.clone())
    }

    /// Returns the connection's rank for displacement, or `None` if a request is under way or the
    /// connection is already displaced.
    pub(crate) fn idle(&self) -> Option<IdleRank> {
        let idle = !self.is_busy() && !self.is_displaced();
        idle.then(|| IdleRank { served: self.served.load(Ordering::Relaxed), since: self.idle_at() })
    }

    /// Asks the connection to end because a new connection needs its slot.
    pub(crate) fn displace(&self) {
        self.displaced.store(true, Ordering::SeqCst);
        self.wake.notify_one();
    }

    /// Whether a request is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Whether no request has begun so far.
    pub(crate) fn is_unserved(&self) -> bool {
        !self.served.load(Ordering::Relaxed)
    }

    pub(crate) fn is_displaced(&self) -> bool {
        self.displaced.load(Ordering::Relaxed)
    }

    fn idle_at(&self) -> Instant {
        self.accepted + Duration::from_millis(self.idle_since.load(Ordering::Relaxed))
    }

    /// Returns the watchdog's next step at `now`.
    pub(crate) fn next_step(&self, now: Instant, config: &ServerConfig) -> WatchdogStep {
        let by = |deadline: Instant, why: ConnectionEnd| {
            if now >= deadline { WatchdogStep::End(why) } else { WatchdogStep::LookAgainAt(deadline) }
        };
        if self.under_way.load(Ordering::SeqCst) > 0 {
            return WatchdogStep::LookAgainAt(now + config.idle_max);
        }
        if self.is_displaced() {
            return WatchdogStep::End(ConnectionEnd::Displaced);
        }
        if self.served.load(Ordering::Relaxed) {
            return by(self.idle_at() + config.idle_max, ConnectionEnd::Idle);
        }
        if !self.opened.load(Ordering::Relaxed) {
            return by(self.accepted + config.opening_max, ConnectionEnd::NoOpening);
        }
        by(self.accepted + config.head_max, ConnectionEnd::NoRequest)
    }

    /// Waits until the connection must end, and returns the reason.
    pub(crate) async fn wait_for_end(&self, config: &ServerConfig) -> ConnectionEnd {
        loop {
            match self.next_step(Instant::now(), config) {
                WatchdogStep::End(why) => return why,
                WatchdogStep::LookAgainAt(when) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(when) => {}
                        () = self.wake.notified() => {}
                    }
                }
            }
        }
    }
}

/// Counts a request as under way until it is dropped.
#[derive(Debug)]
pub(crate) struct RequestGuard(Arc<ConnectionState>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let watched = &self.0;
        let idle_since = watched.accepted.elapsed().as_millis();
        watched.idle_since.store(u64::try_from(idle_since).unwrap_or(u64::MAX), Ordering::Relaxed);
        // SeqCst here and in `displace`: at least one of the two threads sees the other's store.
        if watched.under_way.fetch_sub(1, Ordering::SeqCst) == 1 && watched.displaced.load(Ordering::SeqCst) {
            // The connection was displaced just as this request began.
            watched.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ServerConfig {
        ServerConfig {
            opening_max: Duration::from_secs(5),
            head_max: Duration::from_secs(60),
            idle_max: Duration::from_secs(300),
            ..ServerConfig::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_a_connection_by_how_far_it_came() {
        let config = config();
        let watched = ConnectionState::new();
        let judge = || watched.next_step(Instant::now(), &config);
        let accepted = Instant::now();
        assert_eq!(judge(), WatchdogStep::LookAgainAt(accepted + config.opening_max));
        tokio::time::advance(config.opening_max).await;
        assert_eq!(judge(), WatchdogStep::End(ConnectionEnd::NoOpening));
        watched.open();
        assert_eq!(judge(), WatchdogStep::LookAgainAt(accepted + config.head_max));
        tokio::time::advance(config.head_max).await;
        assert_eq!(judge(), WatchdogStep::End(ConnectionEnd::NoRequest));
        let request = watched.begin_request();
        assert_eq!(judge(), WatchdogStep::LookAgainAt(Instant::now() + config.idle_max));
        drop(request);
        let idle_since = Instant::now();
        assert_eq!(judge(), WatchdogStep::LookAgainAt(idle_since + config.idle_max));
        tokio::time::advance(config.idle_max).await;
        assert_eq!(judge(), WatchdogStep::End(ConnectionEnd::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_displaced_as_a_request_began_ends_with_that_request() {
        let config = config();
        let watched = ConnectionState::new();
        let request = watched.begin_request();
        watched.displace();
        let mut silent = std::pin::pin!(watched.wait_for_end(&config));
        assert!(futures::poll!(silent.as_mut()).is_pending());
        drop(request);
        let then = Instant::now();
        assert_eq!(silent.await, ConnectionEnd::Displaced);
        assert_eq!(Instant::now(), then);
    }

    #[tokio::test]
    async fn a_connection_with_a_request_under_way_is_not_displaced() {
        let config = config();
        let watched = ConnectionState::new();
        let request = watched.begin_request();
        watched.displace();
        assert!(matches!(watched.next_step(Instant::now(), &config), WatchdogStep::LookAgainAt(_)));
        drop(request);
        assert_eq!(watched.wait_for_end(&config).await, ConnectionEnd::Displaced);
    }
}
