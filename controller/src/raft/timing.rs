//! How long things among controllers take at most, where one depends on the other.

use std::time::Duration;

/// A heartbeat, which is also how long a follower may take to append: below that, a busy disk looks
/// like a dead follower. openraft ticks every one and a half of these.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(100);
/// How long after it heard its leader a voter grants no vote to another.
pub(super) const LEASE: Duration = Duration::from_millis(450);
/// How long silence lasts before the first follower stands: the others' leases must be over, which
/// may have begun one heartbeat later.
pub(super) const SILENCE: Duration = Duration::from_millis(500);
/// How much longer the next in turn waits: the one before it asks, stands and is elected meanwhile.
pub(super) const TURN: Duration = Duration::from_millis(150);
/// How long a vote may take: it is made durable at both ends. openraft takes it for its shortest
/// election timeout, of which nothing else depends here.
pub(super) const VOTE_TIMEOUT: Duration = Duration::from_millis(400);

const _: () = assert!(
    LEASE.as_millis() > 4 * HEARTBEAT.as_millis(),
    "a leader is believed though some of its heartbeats are late"
);
const _: () = assert!(SILENCE.as_millis() > LEASE.as_millis(), "whoever stands may be voted for");
const _: () = assert!(VOTE_TIMEOUT.as_millis() < LEASE.as_millis(), "openraft wants its timeouts in order");
