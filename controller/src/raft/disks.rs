//! Handles a slow or full disk of the leader. openraft sends no heartbeats while a sync of the leader's log
//! runs, so a sync longer than the election timeout costs the leadership without this module. A leader with
//! slow but shorter syncs stays leader, and every write of the cluster waits for its disk, although other
//! disks are fast. This module makes such a leader hand leadership over.
//!
//! ```text
//!   every sync slow for SLOW_MAX ─► is a voter with a fast disk available? ─ yes ─► transfer
//!                                                └─ no ─► check again later
//! ```
//! A leader with a full disk hands leadership over the same way. Until then, or if every disk is full,
//! the leader refuses commands that enlarge the state. Deletions and the leader's own upkeep continue
//! in the disk space that the log reserves.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_cluster_state::StateCommand;
use millrace_raft_store::{DiskHealth, SYNC_SLOW};
use millrace_types::{Failure, Reason};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::replica::Replica;
use super::rules::PROMOTION_LAG_MAX;
use super::timing::SILENCE;

/// The time that all syncs of a leader must be slow before the leader hands leadership over,
/// because a disk may be busy for a moment. [`SLOW_SYNCS_MIN`] is the minimum number of slow syncs.
const SLOW_MAX: Duration = Duration::from_secs(2);
const SLOW_SYNCS_MIN: u32 = 3;
/// The minimum time between becoming leader, or an attempt to hand over, and the next attempt. Without
/// this pause, leadership would circle between controllers whose disks are slow in turn.
const LEAD_MIN: Duration = Duration::from_secs(10);
/// The interval between checks of the disk.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The duration of a sync after which the disk counts as hanging: the election timeout, so the
/// followers depose the leader.
const HANGS_MIN: Duration = SILENCE;
/// The extra election timeout of a controller with a slow disk. The other controllers call elections
/// first, and store votes sooner.
const HANDICAP: Duration = SILENCE.saturating_mul(2);

/// The time after the last write during which a disk still counts as hanging.
const LATELY: Duration = Duration::from_secs(2);

/// The state of a controller's disk, as the controller reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiskReport {
    outstanding_ms: u64,
    slow_for_ms: u64,
    slow_syncs: u32,
    last_ms: u64,
    idle_ms: u64,
    /// Whether the disk has too little space for the log to grow.
    full: bool,
}

impl From<DiskHealth> for DiskReport {
    fn from(health: DiskHealth) -> Self {
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Self {
            outstanding_ms: millis(health.outstanding),
            slow_for_ms: millis(health.slow_for),
            slow_syncs: health.slow_syncs,
            last_ms: millis(health.last),
            idle_ms: millis(health.idle),
            full: health.full,
        }
    }
}

impl DiskReport {
    fn is_slow(&self) -> bool {
        self.slow_syncs > 0
    }

    /// Whether the disk has been slow for longer than a moment.
    fn stays_slow(&self) -> bool {
        let slow_max = u64::try_from(SLOW_MAX.as_millis()).unwrap_or(u64::MAX);
        self.slow_syncs >= SLOW_SYNCS_MIN && self.slow_for_ms >= slow_max
    }

    /// Whether another controller should lead, if possible.
    fn is_unfit(&self) -> bool {
        self.full || self.stays_slow()
    }

    /// Whether a write would wait in vain: the current sync hangs, or the recent syncs all hung.
    fn hangs(&self) -> bool {
        let hangs_min = u64::try_from(HANGS_MIN.as_millis()).unwrap_or(u64::MAX);
        // An idle disk is in an unknown state: only the next write can show whether the disk still
        // hangs.
        let lately = self.idle_ms < u64::try_from(LATELY.as_millis()).unwrap_or(u64::MAX);
        self.outstanding_ms >= hangs_min || (self.slow_syncs > 1 && self.last_ms >= hangs_min && lately)
    }

    /// Returns a warning for the operator about the disk, if any.
    pub(super) fn warning(&self, id: u64) -> Option<String> {
        if self.full {
            return Some(format!(
                "the disk of controller {id} is full: changes that make the state larger are refused while it leads, and its log uses the space reserved for it: free space on that disk"
            ));
        }
        self.is_slow().then(|| {
            let slowest = self.last_ms.max(self.outstanding_ms);
            format!(
                "the disk of controller {id} is slow: its last {} syncs took over {SYNC_SLOW:?} each, up to {slowest}ms; while it leads, every write waits for them",
                self.slow_syncs
            )
        })
    }
}

/// Returns the extra election timeout of a controller with this disk.
pub(super) fn handicap(health: DiskHealth) -> Duration {
    if health.slow_syncs > 0 { HANDICAP } else { Duration::ZERO }
}

/// Another voter that answered, with the properties that decide whether this voter may lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Candidate {
    disk: DiskReport,
    /// Log entries that the voter lacks; `None` if unknown.
    lag: Option<u64>,
}

/// Returns the voter that should replace a leader with this disk: of the voters with a fast disk that
/// has space, the one with the smallest lag.
fn successor(own: &DiskReport, candidates: &BTreeMap<u64, Candidate>) -> Option<u64> {
    if !own.is_unfit() {
        return None;
    }
    let fit = candidates.iter().filter(|(_, it)| !it.disk.is_slow() && !it.disk.full);
    let near = fit.filter_map(|(&id, it)| Some((it.lag.filter(|&lag| lag <= PROMOTION_LAG_MAX)?, id)));
    near.min().map(|(_, id)| id)
}

/// Hands leadership over when the disk is slow or full, until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // The result is `None` after a stop.
    stop.run_until_cancelled(run(replica)).await;
}

async fn run(replica: Replica) {
    let mut led: Option<(u64, Instant)> = None;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        replica.disk.look_for_space();
        let Some(term) = replica.leading_term() else {
            led = None;
            continue;
        };
        let since = led.filter(|(of, _)| *of == term).map_or_else(Instant::now, |(_, since)| since);
        led = Some((term, since));
        let own = DiskReport::from(replica.disk.health());
        if since.elapsed() < LEAD_MIN || !own.is_unfit() {
            continue;
        }
        if let Some(successor) = successor(&own, &replica.candidates().await) {
            tracing::warn!(
                successor,
                slow_for_ms = own.slow_for_ms,
                full = own.full,
                "handing leadership over: this controller's disk is slow or full, and the successor's is not"
            );
            if let Err(failure) = replica.transfer_here(successor).await {
                tracing::warn!(
                    error = failure.message,
                    "cannot hand leadership over: the leader's disk stays slow or full for now"
                );
            }
        }
        // Restart the pause even if no successor was found.
        led = Some((term, Instant::now()));
    }
}

impl Replica {
    /// Returns the other voters that answer and follow this controller. While this disk hangs, another
    /// controller may have been elected without openraft's knowledge.
    async fn candidates(&self) -> BTreeMap<u64, Candidate> {
        let voters: BTreeSet<u64> = self.membership().voter_ids().collect();
        let own = self.own_status();
        let answered = self.statuses().await.into_iter().filter_map(|(id, status)| Some((id, status.ok()?)));
        let own_id = self.id().0;
        let follows =
            |id: u64, leader: Option<u64>| id != own_id && voters.contains(&id) && leader == Some(own_id);
        let others = answered.filter(|(id, status)| follows(*id, status.leader));
        others.map(|(id, status)| (id, Candidate { disk: status.disk, lag: own.lag(id) })).collect()
    }

    /// Refuses a request at once while this controller's disk hangs and other voters exist. openraft
    /// waits for the disk, so this controller applies nothing and does not learn of a new leader.
    pub(super) fn check_disk(&self) -> Result<(), Failure> {
        let disk = DiskReport::from(self.disk.health());
        if !disk.hangs() || self.membership().voter_ids().count() < 2 {
            return Ok(());
        }
        let why = if disk.full { "is full" } else { "hangs" };
        let message = format!(
            "the disk of controller {} {why}: ask another controller, or read stale; see 'millrace cluster status'",
            self.id().0
        );
        Err(Failure::new(Reason::NoLeader, message))
    }

    /// Refuses a command that enlarges the state while this disk is full. The caller must lead.
    pub(super) fn check_space(&self, command: &StateCommand) -> Result<(), Failure> {
        let grows = matches!(
            command,
            StateCommand::ApplyFunction { .. }
                | StateCommand::ApplyWorkflow { .. }
                | StateCommand::AddArtifact { .. }
                | StateCommand::BeginOperation { .. }
                | StateCommand::RecordTrial { .. }
        );
        if !grows || !self.disk.health().full {
            return Ok(());
        }
        let message = format!(
            "the disk of controller {}, the leader, is full: free space on that disk, or delete functions",
            self.id().0
        );
        Err(Failure::new(Reason::StorageFull, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(slow_syncs: u32, slow_for_ms: u64) -> DiskReport {
        DiskReport { slow_syncs, slow_for_ms, last_ms: 300, ..FAST }
    }

    const FAST: DiskReport =
        DiskReport { outstanding_ms: 0, slow_for_ms: 0, slow_syncs: 0, last_ms: 5, idle_ms: 0, full: false };

    #[test]
    fn only_a_disk_that_stays_slow_makes_its_leader_hand_over() {
        let candidates = BTreeMap::from([(2, Candidate { disk: FAST, lag: Some(0) })]);
        let check = |own: DiskReport| successor(&own, &candidates);
        assert_eq!(check(FAST), None);
        assert_eq!(check(disk(2, 5_000)), None, "two syncs are too few to tell");
        assert_eq!(check(disk(9, 1_999)), None, "too short a time");
        assert_eq!(check(disk(3, 2_000)), Some(2));
    }

    #[test]
    fn the_successor_has_a_fast_disk_and_the_smallest_lag() {
        let own = disk(10, 10_000);
        let check = |candidates: &[(u64, DiskReport, Option<u64>)]| {
            let candidates = candidates.iter().map(|&(id, disk, lag)| (id, Candidate { disk, lag }));
            successor(&own, &candidates.collect())
        };
        assert_eq!(check(&[]), None, "no voter answers");
        assert_eq!(check(&[(2, FAST, Some(9)), (3, FAST, Some(2))]), Some(3));
        assert_eq!(check(&[(2, FAST, Some(9)), (3, disk(1, 200), Some(2))]), Some(2));
        let all_slow = [(2, disk(9, 9_000), Some(0)), (3, disk(1, 200), Some(2))];
        assert_eq!(check(&all_slow), None, "no voter has a faster disk");
        assert_eq!(check(&[(2, FAST, None), (3, FAST, Some(PROMOTION_LAG_MAX + 1))]), None);
    }

    #[test]
    fn a_leader_on_a_full_disk_hands_over_to_a_voter_with_space() {
        let full = DiskReport { full: true, ..FAST };
        let check = |disk: DiskReport| successor(&full, &[(2, Candidate { disk, lag: Some(0) })].into());
        assert_eq!(check(FAST), Some(2));
        assert_eq!(check(full), None);
        assert_eq!(check(disk(1, 200)), None);
        assert!(full.warning(3).unwrap().starts_with("the disk of controller 3 is full"));
    }

    #[test]
    fn a_disk_hangs_during_a_hanging_sync_and_between_two_such_syncs() {
        let hangs = |outstanding_ms, slow_syncs, last_ms| {
            DiskReport { outstanding_ms, slow_for_ms: 9_000, slow_syncs, last_ms, idle_ms: 0, full: false }
                .hangs()
        };
        assert!(!hangs(499, 1, 5), "not yet");
        assert!(hangs(500, 1, 5));
        assert!(!hangs(0, 1, 900), "a single long sync is over");
        assert!(hangs(3, 2, 900), "the next of several hanging syncs");
        assert!(!hangs(250, 9, 300), "slow");
        let idle = DiskReport { slow_syncs: 9, last_ms: 900, idle_ms: 2_000, ..FAST };
        assert!(!idle.hangs(), "without a recent write, the state is unknown");
    }

    #[test]
    fn a_slow_disk_yields_a_warning_and_a_longer_election_timeout() {
        assert_eq!(FAST.warning(2), None);
        let warning = disk(4, 1_200).warning(2).unwrap();
        assert!(warning.contains("controller 2 is slow: its last 4 syncs took over 200ms"), "{warning}");
        assert_eq!(handicap(DiskHealth::default()), Duration::ZERO);
        assert!(handicap(DiskHealth { slow_syncs: 1, ..DiskHealth::default() }) > SILENCE);
    }
}
