//! Timeouts that depend on each other, or that several files share: of elections, of writes, and of
//! joining a group.

use std::time::Duration;

/// The heartbeat interval, and the longest time that a follower may take to append: with less, a busy
/// disk looks like a dead follower. openraft ticks every 1.5 heartbeats.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(100);
/// The time after the leader's last message during which a voter grants no vote to another controller.
pub(super) const LEASE: Duration = Duration::from_millis(450);
/// The election timeout of the first follower in turn. The leases of the other followers must have
/// ended by then; a lease may have begun a heartbeat later.
pub(super) const SILENCE: Duration = Duration::from_millis(500);
/// The extra election timeout of each further follower in turn: meanwhile the previous follower
/// pre-votes, calls the election and wins.
pub(super) const TURN: Duration = Duration::from_millis(150);
/// The timeout of a vote, including a sync at both ends. openraft uses this as its minimum election
/// timeout, on which nothing else depends here.
pub(super) const VOTE_TIMEOUT: Duration = Duration::from_millis(400);
/// The timeout of a proposal until the command is applied. A disk may stall for less. Without a
/// majority for longer than this, the outcome of the write is unknown.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout for the election in a group of one: a few syncs, on a disk that may be very busy.
pub(super) const LEADING_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout of each phase of joining: first until the group answers, then until the log arrives.
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// The pause between two attempts to join, or to be promoted.
pub(super) const JOIN_PAUSE: Duration = Duration::from_millis(200);

const _: () = assert!(
    LEASE.as_millis() > 4 * HEARTBEAT.as_millis(),
    "a leader is believed though some of its heartbeats are late"
);
const _: () = assert!(SILENCE.as_millis() > LEASE.as_millis(), "a candidate may get votes");
const _: () =
    assert!(VOTE_TIMEOUT.as_millis() < LEASE.as_millis(), "openraft requires its timeouts in order");
