//! Carries the bytes of one connection, as its link allows.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::rules::{Party, Rules, State};
use crate::clock;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks under way in one direction of one connection: with a delay, what the link holds.
const CHUNKS_MAX: usize = 64;

/// One connection's view of its link.
#[derive(Clone)]
pub(super) struct Link {
    rules: watch::Receiver<Rules>,
    held: Arc<watch::Sender<usize>>,
    ends: (Party, Party),
    /// The resets there had been when it was opened.
    resets: u64,
}

/// The link was reset.
#[derive(Debug)]
pub(super) struct Reset;

/// Counts a connection that a cut holds, while it does.
struct Held(Arc<watch::Sender<usize>>);

impl Held {
    fn new(held: &Arc<watch::Sender<usize>>) -> Self {
        held.send_modify(|held| *held += 1);
        Self(held.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.send_modify(|held| *held -= 1);
    }
}

impl Link {
    pub(super) fn new(
        rules: watch::Receiver<Rules>,
        held: &Arc<watch::Sender<usize>>,
        from: Party,
        to: Party,
    ) -> Self {
        let resets = rules.borrow().resets();
        Self { rules, held: held.clone(), ends: (from, to), resets }
    }

    fn state(&self) -> State {
        self.rules.borrow().state(&self.ends.0, &self.ends.1)
    }

    /// Waits while the link is cut. A reset closes what a cut held, and nothing else.
    pub(super) async fn open(&self) -> Result<(), Reset> {
        if !self.state().cut {
            return Ok(());
        }
        let _held = Held::new(&self.held);
        let mut rules = self.rules.clone();
        let ends = &self.ends;
        let mended = rules.wait_for(|rules| !rules.state(&ends.0, &ends.1).cut).await;
        // Whoever made the rules is gone: nothing is to be carried any more.
        let resets = mended.map_err(|_| Reset)?.resets();
        if resets > self.resets { Err(Reset) } else { Ok(()) }
    }

    fn delay(&self) -> Duration {
        self.state().delay
    }
}

/// Carries both directions until both have ended, or the link was reset.
pub(super) async fn both(link: Link, near: TcpStream, far: TcpStream) {
    // Small messages must not wait here for more of them; without it they are only slower.
    for stream in [&near, &far] {
        stream.set_nodelay(true).ok();
    }
    let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
    // Either's reset ends both: the halves are dropped with the future.
    let _ended = tokio::try_join!(one_way(&link, near_read, far_write), one_way(&link, far_read, near_write));
}

/// Carries one direction to its end, in order, each chunk after its delay.
async fn one_way(link: &Link, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<(), Reset> {
    let (queue, mut chunks) = mpsc::channel::<(Instant, Bytes)>(CHUNKS_MAX);
    let read = async move {
        let mut buffer = vec![0; CHUNK_BYTES];
        // A connection that breaks ends as one that is closed.
        while let Ok(len @ 1..) = from.read(&mut buffer).await {
            let chunk = Bytes::copy_from_slice(&buffer[..len]);
            if queue.send((clock::now() + link.delay(), chunk)).await.is_err() {
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
