//! Wall-clock time, read here and nowhere else: the leader stamps it into commands.

use std::fmt::Debug;

use millrace_cluster_state::UnixMillis;

/// Where stamps come from.
pub trait WallClock: Debug + Send + Sync + 'static {
    /// Now.
    fn now(&self) -> UnixMillis;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl WallClock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "this is the clock that others are handed")]
    fn now(&self) -> UnixMillis {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        // A clock before 1970 stamps 0; the state's own clock never runs backwards.
        UnixMillis(since_epoch.map_or(0, |span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)))
    }
}
