//! Conversions of durations and times.

use std::time::Duration;

use millrace_types::{Failure, Reason};

/// Parses a protobuf duration. Returns `None` if the duration is negative or out of range.
#[must_use]
pub fn duration(wire: &prost_types::Duration) -> Option<Duration> {
    Duration::try_from(*wire).ok()
}

/// Encodes a duration. A duration beyond protobuf's range becomes the maximum.
#[must_use]
pub fn duration_wire(span: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(span)
        .unwrap_or(prost_types::Duration { seconds: 315_576_000_000, nanos: 0 })
}

/// Encodes a wall-clock time in milliseconds since 1970.
#[must_use]
pub fn timestamp_wire(unix_ms: u64) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX),
        nanos: i32::try_from(unix_ms % 1000).unwrap_or(0) * 1_000_000,
    }
}

/// Parses an optional duration of a spec.
pub(super) fn time(field: &str, wire: Option<prost_types::Duration>) -> Result<Option<Duration>, Failure> {
    let negative = || {
        let message = format!("{field} is negative: give a time such as 50ms");
        Failure::new(Reason::InvalidSpec, message)
    };
    wire.map(|wire| duration(&wire).ok_or_else(negative)).transpose()
}
