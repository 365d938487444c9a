//! The minimum rate at which a client must send a message that has begun, and read a response.
//!
//! A [`ProgressClock`] is a leaky bucket of time. The bucket starts with the grace, earns the time
//! that transferred bytes take at the minimum rate, and never holds more than the grace. A client
//! that sent half a message fast and then stops has at most the grace left, the same as a client that
//! sent nothing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep};

/// The rate that messages and responses must keep once they have begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinimumRate {
    /// Time that a client may be behind the rate.
    pub grace: Duration,
    /// Minimum rate in bytes per second; greater than 0.
    pub bytes_per_sec: u64,
}

/// The remaining time of a message or connection.
#[derive(Debug)]
pub struct ProgressClock {
    minimum: MinimumRate,
    until: Instant,
    /// Bytes moved since `until` was last computed.
    progress: u64,
}

impl MinimumRate {
    /// Rate for other processes of the cluster. The grace is long, so that a paused or distant
    /// process is not cut off.
    pub const PEER: Self = Self { grace: Duration::from_secs(30), bytes_per_sec: 64 << 10 };

    /// Returns the time that `bytes` may take, including the grace.
    pub(crate) fn time_for(self, bytes: u64) -> Duration {
        self.grace + self.earned_by(bytes)
    }

    fn earned_by(self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_sec.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl ProgressClock {
    /// Starts a clock with the full grace.
    #[must_use]
    pub fn begin(minimum: MinimumRate) -> Self {
        Self { minimum, until: Instant::now() + minimum.grace, progress: 0 }
    }

    /// Counts bytes that arrived or were sent. Reads no clock.
    pub fn progress(&mut self, bytes: usize) {
        self.progress += bytes as u64;
    }

    /// Returns the time at which the client is too slow unless more bytes move before. Call this
    /// function only when the server can do nothing but wait for the client.
    pub fn until(&mut self) -> Instant {
        if self.progress > 0 {
            let now = Instant::now();
            let full = now + self.minimum.grace;
            let earned = self.until + self.minimum.earned_by(std::mem::take(&mut self.progress));
            // A call this late means that the server was busy elsewhere and did not wait for the client.
            let unobserved = now > self.until + self.minimum.grace;
            self.until = if unobserved { full } else { earned.min(full) };
        }
        self.until
    }
}

/// A timer with a movable deadline, created on first use.
#[derive(Debug, Default)]
pub struct DeadlineTimer(Option<Pin<Box<Sleep>>>);

impl DeadlineTimer {
    /// Ready once `until` has passed. `until` may be later at each call: to save work, the timer is
    /// reset when it fires and not at each call.
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

/// A connection that fails when its peer reads bytes more slowly than the minimum rate.
/// Bytes that HTTP/2 holds back because of a stream's window never arrive here; `stream_timeout`
/// covers those.
pub(crate) struct PacedWrites<T> {
    inner: T,
    /// Minimum rate; `None` allows any rate.
    minimum: Option<MinimumRate>,
    /// Clock that runs from the first write without room until the next complete flush.
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
        // Each second earns half a second, so the grace of 5 s lasts 9.5 s.
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
    async fn a_connection_ends_only_after_its_peer_stops_reading() {
        let (mut peer, own) = tokio::io::duplex(64 << 10);
        let mut writes = PacedWrites::new(TokioIo::new(own), Some(MINIMUM));
        let began = Instant::now();
        let reading = async {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                peer.read_exact(&mut vec![0; 64 << 10]).await.unwrap();
            }
            // From now on the connection is open but unread.
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
