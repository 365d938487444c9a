//! The minimum rate: how slowly a client may send a message that it has begun, and read an answer.
//!
//! A [`ProgressClock`] is a leaky bucket of time. The bucket begins with the grace, earns the time that
//! arrived bytes take at the minimum rate, and never holds more than the grace. So a client that sent
//! half a message fast and then stopped has the grace left, as a client that sent nothing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep};

/// The rate that messages and answers must keep once they have begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinimumRate {
    /// Time that a client may be behind the rate.
    pub grace: Duration,
    /// The rate. Not 0.
    pub bytes_per_sec: u64,
}

/// The time that one message or connection has left.
#[derive(Debug)]
pub struct ProgressClock {
    minimum: MinimumRate,
    until: Instant,
    /// Bytes since `until` was last looked at.
    progress: u64,
}

impl MinimumRate {
    /// What other processes of a cluster are held to: one that is paused or far away is not given up.
    pub const PEER: Self = Self { grace: Duration::from_secs(30), bytes_per_sec: 64 << 10 };

    /// The time that `bytes` may take, the grace included.
    pub(crate) fn time_for(self, bytes: u64) -> Duration {
        self.grace + self.earned_by(bytes)
    }

    fn earned_by(self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_sec.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl ProgressClock {
    /// Starts with the whole grace.
    #[must_use]
    pub fn begin(minimum: MinimumRate) -> Self {
        Self { minimum, until: Instant::now() + minimum.grace, progress: 0 }
    }

    /// Counts bytes that arrived or left. Reads no clock.
    pub fn progress(&mut self, bytes: usize) {
        self.progress += bytes as u64;
    }

    /// When the client is too slow, unless more bytes move before. Called when there is nothing more
    /// to do than to wait.
    pub fn until(&mut self) -> Instant {
        if self.progress > 0 {
            let now = Instant::now();
            let full = now + self.minimum.grace;
            let earned = self.until + self.minimum.earned_by(std::mem::take(&mut self.progress));
            // A look as late as this means that the server did not wait for the client.
            let unobserved = now > self.until + self.minimum.grace;
            self.until = if unobserved { full } else { earned.min(full) };
        }
        self.until
    }
}

/// A timer whose end may move, made when it is first needed.
#[derive(Debug, Default)]
pub struct DeadlineTimer(Option<Pin<Box<Sleep>>>);

impl DeadlineTimer {
    /// Ready once `until` has passed. `until` may be later at each call: the timer is set again when
    /// it fires, not each time.
    pub fn poll(&mut self, until: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.0.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if timer.deadline() > until {
            timer.as_mut().reset(until);
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= until {
                return Poll::Ready(());
            }
            timer.as_mut().reset(until);
        }
    }
}

/// A connection that ends when its peer takes bytes more slowly than the minimum rate. What HTTP/2
/// holds back for a stream's window never comes here: `reading` sees to that.
pub(crate) struct PacedWrites<T> {
    inner: T,
    /// `None`: no rate is demanded.
    minimum: Option<MinimumRate>,
    /// Running from a write that found no room until everything is written.
    pace: Option<ProgressClock>,
    timer: DeadlineTimer,
}

impl<T> PacedWrites<T> {
    pub(crate) fn new(inner: T, minimum: Option<MinimumRate>) -> Self {
        Self { inner, minimum, pace: None, timer: DeadlineTimer::default() }
    }

    fn paced(&mut self, written: Poll<io::Result<usize>>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => {
                if let Some(pace) = &mut self.pace {
                    pace.progress(bytes);
                }
                Poll::Ready(Ok(bytes))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                let Some(minimum) = self.minimum else { return Poll::Pending };
                let until = self.pace.get_or_insert_with(|| ProgressClock::begin(minimum)).until();
                ready!(self.timer.poll(until, cx));
                let message = "the client reads more slowly than the minimum rate";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
            }
        }
    }
}

impl<T: Read + Unpin> Read for PacedWrites<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: Write + Unpin> Write for PacedWrites<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, piece: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, piece);
        self.paced(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, pieces);
        self.paced(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
        self.pace = None;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use hyper_util::rt::TokioIo;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    const MINIMUM: MinimumRate = MinimumRate { grace: Duration::from_secs(5), bytes_per_sec: 64 << 10 };

    async fn seconds(pace: &mut ProgressClock, seconds: u64, bytes: usize) -> bool {
        let until = pace.until();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        pace.progress(bytes);
        Instant::now() >= until
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_at_the_minimum_rate_is_in_time_and_a_slower_one_is_not() {
        let mut pace = ProgressClock::begin(MINIMUM);
        for _ in 0..100 {
            assert!(!seconds(&mut pace, 1, 64 << 10).await);
        }
        let mut pace = ProgressClock::begin(MINIMUM);
        let mut late = Vec::new();
        for _ in 0..11 {
            late.push(seconds(&mut pace, 1, 32 << 10).await);
        }
        // Each second earns half of one: the grace of 5 s lasts 9 and a half.
        assert_eq!(late.iter().position(|&late| late), Some(8), "{late:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_sent_fast_earn_no_more_than_the_grace() {
        let mut pace = ProgressClock::begin(MINIMUM);
        pace.progress(256 << 20);
        assert_eq!(pace.until() - Instant::now(), MINIMUM.grace);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_was_not_waited_for_has_its_grace_again() {
        let mut pace = ProgressClock::begin(MINIMUM);
        tokio::time::advance(Duration::from_secs(60)).await;
        pace.progress(1);
        assert_eq!(pace.until() - Instant::now(), MINIMUM.grace);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_peer_reads_nothing_ends_and_one_that_reads_goes_on() {
        let (mut peer, own) = tokio::io::duplex(64 << 10);
        let mut writes = PacedWrites::new(TokioIo::new(own), Some(MINIMUM));
        let began = Instant::now();
        let reading = async {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                peer.read_exact(&mut vec![0; 64 << 10]).await.unwrap();
            }
            // Open and unread from now on.
            std::future::pending::<()>().await;
        };
        let writing = async {
            loop {
                if let Err(error) = poll_fn(|cx| Pin::new(&mut writes).poll_write(cx, &[0; 1 << 10])).await {
                    return error;
                }
            }
        };
        let error = tokio::select! {
            error = writing => error,
            () = reading => unreachable!(),
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let unread = began.elapsed() - Duration::from_secs(20);
        assert!(unread > Duration::from_secs(4) && unread <= MINIMUM.grace, "{unread:?}");
    }
}
