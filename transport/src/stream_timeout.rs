//! Detects HTTP/2 streams whose clients do not read their responses, and resets these streams.
//!
//! hyper asks a body for its next piece before hyper waits for the client's window, and does not poll
//! the body while the window is closed. Therefore the stream's task measures the time, not the body.
//! The body only tells the task which side the stream waits for.
//!
//! An HTTP/1 connection carries a single response at a time, and its writes are timed instead (`pace`).

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use tokio::time::Instant;

use crate::pace::{DeadlineTimer, MinimumRate};
use crate::violations::AddressViolations;

/// Most bytes of a response that a body hands to HTTP/2 at a time. Two steps may be in flight. The
/// client must read both within the grace plus their time at the minimum rate.
pub(crate) const STEP: usize = 128 << 10;

/// The side that an HTTP/2 stream waits for, as recorded by the body of its response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum StreamWait {
    /// The body recorded nothing since the last poll.
    #[default]
    Unchanged,
    /// The stream waits for the server's own work.
    Server,
    /// The stream waits for the client, which was sent another piece.
    Client,
}

tokio::task_local! {
    static AWAITS: Cell<StreamWait>;
}

/// Records that this stream waits for its client, which was sent up to [`STEP`] more bytes.
pub(crate) fn await_client() {
    set(StreamWait::Client);
}

/// Records that this stream waits for the server's own work.
pub(crate) fn await_server() {
    set(StreamWait::Server);
}

fn set(now: StreamWait) {
    // An HTTP/1 connection has no stream task, so there is nothing to record.
    let _outside = AWAITS.try_with(|awaits| awaits.set(now));
}

/// Runs the streams of an HTTP/2 connection. A stream whose client does not read the response in time
/// is dropped, which resets the stream and frees its bytes.
#[derive(Debug, Clone)]
pub(crate) struct StreamExecutor {
    /// Minimum rate; `None` lets clients read responses at any rate.
    pub(crate) minimum: Option<MinimumRate>,
    pub(crate) conduct: AddressViolations,
}

impl<F> hyper::rt::Executor<F> for StreamExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, stream: F) {
        // A stream has kilobytes, and each future around it would hold and move copies of its own.
        let stream = Box::pin(stream);
        match self.minimum {
            Some(minimum) => {
                let conduct = self.conduct.clone();
                let stream = async move {
                    if !taken_in_time(stream, minimum).await {
                        tracing::debug!("reset a stream: its client did not read the response in time");
                        conduct.violated();
                    }
                };
                tokio::spawn(AWAITS.scope(Cell::default(), stream))
            }
            None => tokio::spawn(async move { drop(stream.await) }),
        };
    }
}

/// Runs the stream to its end, or until its client has not read the sent bytes in time. Returns
/// whether the client was in time.
async fn taken_in_time(mut stream: impl Future + Unpin, minimum: MinimumRate) -> bool {
    let mut stream = Pin::new(&mut stream);
    let mut timer = DeadlineTimer::default();
    let mut until = None;
    let ended = poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(true);
        }
        match AWAITS.with(Cell::take) {
            StreamWait::Unchanged => {}
            StreamWait::Server => until = None,
            StreamWait::Client => until = Some(Instant::now() + minimum.time_for(2 * STEP as u64)),
        }
        let Some(until) = until else { return Poll::Pending };
        timer.poll(until, cx).map(|()| false)
    });
    ended.await
}
