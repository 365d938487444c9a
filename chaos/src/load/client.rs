//! The parts that every client has: a number, endpoints and a seed. Names the errors in the records of
//! clients.

use std::time::Duration;

use millrace_client::{Endpoints, Error};
use rand::Rng as _;
use rand::rngs::StdRng;
use tokio_util::sync::CancellationToken;

use crate::timeline::Timeline;

/// The parts that every client has.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) number: u32,
    pub(super) endpoints: Endpoints,
    pub(super) timeline: Timeline,
    pub(super) stop: CancellationToken,
    pub(super) rng: StdRng,
}

impl Client {
    /// Waits between two operations. Returns false once the load stops.
    pub(super) async fn think(&mut self, millis: std::ops::Range<u64>) -> bool {
        let pause = Duration::from_millis(self.rng.random_range(millis));
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some()
    }
}

/// Returns the error's stable name and its message.
pub(super) fn error_name(error: &Error) -> String {
    let name = match error {
        Error::Refused(failure) => failure.reason.to_string(),
        Error::Unreachable { .. } => "unreachable".to_owned(),
        Error::ConnectionLost { .. } => "connection lost".to_owned(),
        Error::TimedOut { .. } => "timed out".to_owned(),
        _ => "unexpected".to_owned(),
    };
    format!("{name}: {error}")
}
