//! The limits of the wait for the telemetry of an answered request.

use std::time::Duration;

/// The delay by which telemetry may lag behind the requests that a listing shows.
pub(super) const LAG_MAX: Duration = Duration::from_secs(1);
/// The pause between two reads.
pub(super) const PAUSE: Duration = Duration::from_millis(10);
