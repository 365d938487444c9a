//! Carries the bytes of a connection, as the state of its link allows.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::rules::{LinkParty, LinkRules, LinkSlowness, ProxyLinkState};
use crate::clock;

/// Maximum number of bytes of a read.
const CHUNK_BYTES: usize = 64 << 10;
/// Maximum number of chunks under way in one direction of a connection: the capacity of a link with
/// a delay.
const CHUNKS_MAX: usize = 64;
/// Minimum time after which TCP sends a lost packet again, on Linux.
const RESENT_AFTER: Duration = Duration::from_millis(200);

/// A connection's view of its link.
#[derive(Clone)]
pub(super) struct ProxyLink {
    rules: watch::Receiver<LinkRules>,
    held: Arc<watch::Sender<usize>>,
    /// The sender and the receiver.
    ends: (LinkParty, LinkParty),
    /// Number of resets before the connection was opened.
    resets: u64,
    /// The number of the connection, which seeds its losses.
    number: u64,
}

/// The error that the link was reset.
#[derive(Debug)]
pub(super) struct Reset;

/// Counts a connection that a cut holds, until the value is dropped.
struct HeldConnection(Arc<watch::Sender<usize>>);

impl HeldConnection {
    fn new(held: &Arc<watch::Sender<usize>>) -> Self {
        held.send_modify(|held| *held += 1);
        Self(held.clone())
    }
}

impl Drop for HeldConnection {
    fn drop(&mut self) {
        self.0.send_modify(|held| *held -= 1);
    }
}

impl ProxyLink {
    pub(super) fn new(
        rules: watch::Receiver<LinkRules>,
        held: &Arc<watch::Sender<usize>>,
        from: LinkParty,
        to: LinkParty,
        number: u64,
    ) -> Self {
        let resets = rules.borrow().resets();
        Self { rules, held: held.clone(), ends: (from, to), resets, number }
    }

    fn state(&self) -> ProxyLinkState {
        self.rules.borrow().state(&self.ends.0, &self.ends.1)
    }

    /// Waits while the link is cut. A reset closes the connections that a cut held, and no others.
    pub(super) async fn open(&self) -> Result<(), Reset> {
        if !self.state().cut {
            return Ok(());
        }
        let _held = HeldConnection::new(&self.held);
        let mut rules = self.rules.clone();
        let ends = &self.ends;
        let mended = rules.wait_for(|rules| !rules.state(&ends.0, &ends.1).cut).await;
        // The owner of the rules is gone, so nothing has to be carried any more.
        let resets = mended.map_err(|_| Reset)?.resets();
        if resets > self.resets { Err(Reset) } else { Ok(()) }
    }

    /// Returns the link in the other direction.
    pub(super) fn reversed(&self) -> Self {
        let (from, to) = self.ends.clone();
        Self { ends: (to, from), ..self.clone() }
    }
}

/// The model of one direction of a connection, which computes the arrival of data. Pure.
#[derive(Debug, Default)]
struct WireModel {
    /// Time at which the last byte so far has passed.
    free: Option<Instant>,
}

impl WireModel {
    /// Returns the arrival of a chunk of `len` bytes that is sent now. `drawn`, from 0 to 999,
    /// decides whether the chunk is lost at first. No chunk overtakes an earlier chunk.
    fn due(&mut self, now: Instant, len: usize, slowness: LinkSlowness, drawn: u32) -> Instant {
        let LinkSlowness { delay, loss_permille, bytes_per_second } = slowness;
        let takes = bytes_per_second
            .map_or(Duration::ZERO, |rate| Duration::from_nanos(len as u64 * 1_000_000_000 / rate.get()));
        let again = if drawn < loss_permille { RESENT_AFTER } else { Duration::ZERO };
        let through = self.free.map_or(now, |free| free.max(now)) + takes + again;
        self.free = Some(through);
        through + delay
    }
}

/// Carries both directions until both have ended, or the link was reset.
pub(super) async fn both(link: ProxyLink, near: TcpStream, far: TcpStream) {
    // Small messages must not wait for further ones. If the option cannot be set, the messages are
    // only slower.
    for stream in [&near, &far] {
        stream.set_nodelay(true).ok();
    }
    let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
    // A reset of either direction ends both, because the halves are dropped with the future.
    let there = link.clone();
    let back = link.reversed();
    let _ended =
        tokio::try_join!(one_way(&there, near_read, far_write), one_way(&back, far_read, near_write));
}

/// Carries a direction to its end, in order, each chunk after its delay.
async fn one_way(link: &ProxyLink, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<(), Reset> {
    let (queue, mut chunks) = mpsc::channel::<(Instant, Bytes)>(CHUNKS_MAX);
    let read = async move {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut wire = WireModel::default();
        let mut rng = SmallRng::seed_from_u64(link.number);
        // A connection that breaks ends like a connection that is closed.
        while let Ok(len @ 1..) = from.read(&mut buffer).await {
            let chunk = Bytes::copy_from_slice(&buffer[..len]);
            let due = wire.due(clock::now(), len, link.state().slowness, rng.random_range(0..1000));
            if queue.send((due, chunk)).await.is_err() {
                break;
            }
        }
    };
    let write = async move {
        while let Some((due, chunk)) = chunks.recv().await {
            link.open().await?;
            tokio::time::sleep_until(due).await;
            if to.write_all(&chunk).await.is_err() {
                break;
            }
        }
        link.open().await
    };
    let ((), written) = tokio::join!(read, write);
    written
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    #[test]
    fn a_chunk_arrives_after_earlier_chunks_its_bytes_and_its_delay() {
        let ms = Duration::from_millis;
        let mut wire = WireModel::default();
        let now = clock::now();
        let slowness =
            LinkSlowness { delay: ms(5), loss_permille: 10, bytes_per_second: NonZeroU64::new(1_000_000) };
        assert_eq!(wire.due(now, 2_000, slowness, 999) - now, ms(2 + 5));
        assert_eq!(wire.due(now, 1_000, slowness, 9) - now, ms(2 + 1 + 200 + 5), "lost at first");
        assert_eq!(wire.due(now, 1_000, slowness, 10) - now, ms(203 + 1 + 5), "behind the lost chunk");
        let later = now + ms(1_000);
        assert_eq!(wire.due(later, 0, LinkSlowness::default(), 0), later, "a link without delay");
    }
}
