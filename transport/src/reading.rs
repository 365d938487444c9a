//! HTTP/2 streams whose clients do not take their answers, and the end of those.
//!
//! hyper asks a body for its next piece before it waits for the client's window, and asks no more
//! while that is closed. So the time is kept outside of the body, by the task of the stream; the body
//! tells that task for which side the stream waits. HTTP/1 has a connection for each answer, whose writes are timed (`pace`).

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use tokio::time::Instant;

use crate::conduct::AddressConduct;
use crate::pace::{DeadlineTimer, MinimumRate};

/// The most bytes of an answer that a body gives to HTTP/2 at a time. Two steps may be on their way:
/// the client has to take them within the grace and their time at the minimum rate.
pub(crate) const STEP: usize = 128 << 10;

/// The side for which an HTTP/2 stream waits, as told by the body of its answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Awaits {
    /// The same as before.
    #[default]
    Unchanged,
    /// The server's own work.
    Server,
    /// The client, which has been given another piece.
    Client,
}

tokio::task_local! {
    static AWAITS: Cell<Awaits>;
}

/// Records that this stream waits for its client, which has been given up to [`STEP`] more bytes.
pub(crate) fn await_client() {
    set(Awaits::Client);
}

/// Records that this stream waits for the server's own work.
pub(crate) fn await_server() {
    set(Awaits::Server);
}

fn set(now: Awaits) {
    // An HTTP/1 connection is no stream: there is nothing to tell.
    let _outside = AWAITS.try_with(|awaits| awaits.set(now));
}

/// Runs the streams of an HTTP/2 connection. A stream whose client does not take the answer is
/// dropped: that resets the stream and frees its bytes.
#[derive(Debug, Clone)]
pub(crate) struct StreamExecutor {
    /// `None`: answers may be taken as slowly as the client likes.
    pub(crate) minimum: Option<MinimumRate>,
    pub(crate) conduct: AddressConduct,
}

impl<F> hyper::rt::Executor<F> for StreamExecutor
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, stream: F) {
        match self.minimum {
            Some(minimum) => {
                let conduct = self.conduct.clone();
                let stream = async move {
                    if !taken_in_time(stream, minimum).await {
                        tracing::debug!("a client did not take its answer: its stream is reset");
                        conduct.violated();
                    }
                };
                tokio::spawn(AWAITS.scope(Cell::default(), stream))
            }
            None => tokio::spawn(async move { drop(stream.await) }),
        };
    }
}

/// Ends with the stream, or when its client has not taken what it was given in time. Returns whether the
/// client took it in time.
async fn taken_in_time<F: Future>(stream: F, minimum: MinimumRate) -> bool {
    let mut stream = pin!(stream);
    let mut timer = DeadlineTimer::default();
    let mut until = None;
    let ended = poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(true);
        }
        match AWAITS.with(Cell::take) {
            Awaits::Unchanged => {}
            Awaits::Server => until = None,
            Awaits::Client => until = Some(Instant::now() + minimum.time_for(2 * STEP as u64)),
        }
        let Some(until) = until else { return Poll::Pending };
        timer.poll(until, cx).map(|()| false)
    });
    ended.await
}
