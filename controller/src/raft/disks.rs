//! What is done about a slow disk, and about a full one. Raft alone does half of it: openraft waits for each sync of the
//! leader's log, heartbeats with it, so that one which takes longer than the followers' patience costs
//! the leader its place. A disk that is slow and not that slow keeps it, and every write of the
//! cluster waits for that disk, for as long as it lasts, while others would be fast. So such a leader
//! hands leadership over.
//!
//! ```text
//!   every sync slow for SLOW_MAX ─► which voter has a disk that is not? ─ one ─► transfer
//!                                                └─ none ─► look again later
//! ```
//! A leader whose disk is full hands over the same way. Until then, and where every disk is full, the
//! leader refuses what makes the state larger; deletions and its own upkeep go on in the space that the
//! log keeps reserved.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_cluster_state::Command;
use millrace_raft_store::{DiskHealth, SYNC_SLOW};
use millrace_types::{Failure, Reason};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::replica::Replica;
use super::rules::PROMOTION_LAG_MAX;
use super::timing::SILENCE;

/// How long all of a leader's syncs are slow before it hands over, and how many they are: a disk may
/// be busy for a moment.
const SLOW_MAX: Duration = Duration::from_secs(2);
const SLOW_SYNCS_MIN: u32 = 3;
/// How long a controller leads before it hands over for this, and how long it waits after an attempt:
/// where all disks are slow in turn, leadership does not run in circles.
const LEAD_MIN: Duration = Duration::from_secs(10);
/// How often the disk is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A disk whose sync takes longer than followers are patient hangs: a leader is deposed for it.
const HANGS_MIN: Duration = SILENCE;
/// How much longer a controller with a slow disk lets silence last: the others stand first, and their
/// votes are durable sooner.
const HANDICAP: Duration = SILENCE.saturating_mul(2);

/// How long a disk is taken to hang still that nothing is written to.
const LATELY: Duration = Duration::from_secs(2);

/// How a controller's disk fares, as it tells the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Disk {
    outstanding_ms: u64,
    slow_for_ms: u64,
    slow_syncs: u32,
    last_ms: u64,
    idle_ms: u64,
    /// Whether it has too little space for the log to grow.
    full: bool,
}

impl From<DiskHealth> for Disk {
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

impl Disk {
    fn is_slow(&self) -> bool {
        self.slow_syncs > 0
    }

    /// Whether it has been slow for longer than a moment.
    fn stays_slow(&self) -> bool {
        let slow_max = u64::try_from(SLOW_MAX.as_millis()).unwrap_or(u64::MAX);
        self.slow_syncs >= SLOW_SYNCS_MIN && self.slow_for_ms >= slow_max
    }

    /// Whether its controller should not lead while another could.
    fn is_unfit(&self) -> bool {
        self.full || self.stays_slow()
    }

    /// Whether what waits for it waits in vain: the sync under way hangs, or all hang, one after the
    /// other.
    fn hangs(&self) -> bool {
        let hangs_min = u64::try_from(HANGS_MIN.as_millis()).unwrap_or(u64::MAX);
        // Of a disk that nothing was written to since, nobody knows: the next write will tell.
        let lately = self.idle_ms < u64::try_from(LATELY.as_millis()).unwrap_or(u64::MAX);
        self.outstanding_ms >= hangs_min || (self.slow_syncs > 1 && self.last_ms >= hangs_min && lately)
    }

    /// What an operator should know of it.
    pub(super) fn warning(&self, id: u64) -> Option<String> {
        if self.full {
            return Some(format!(
                "the disk of controller {id} is full: changes that make the state larger are refused while it leads, and its log uses the space reserved for it; free space on it"
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

/// How much longer silence lasts for a controller with this disk.
pub(super) fn handicap(health: DiskHealth) -> Duration {
    if health.slow_syncs > 0 { HANDICAP } else { Duration::ZERO }
}

/// Another voter that answered, as far as it may lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Candidate {
    disk: Disk,
    /// Entries that it lacks, if that is known.
    lag: Option<u64>,
}

/// Who should lead in place of a leader with this disk: whoever has most of the log, of those whose
/// disks are neither slow nor full.
fn successor(own: &Disk, candidates: &BTreeMap<u64, Candidate>) -> Option<u64> {
    if !own.is_unfit() {
        return None;
    }
    let fit = candidates.iter().filter(|(_, it)| !it.disk.is_slow() && !it.disk.full);
    let near = fit.filter_map(|(&id, it)| Some((it.lag.filter(|&lag| lag <= PROMOTION_LAG_MAX)?, id)));
    near.min().map(|(_, id)| id)
}

/// Hands leadership over for a slow or full disk until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // `None` when stopped.
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
        let own = Disk::from(replica.disk.health());
        if since.elapsed() < LEAD_MIN || !own.is_unfit() {
            continue;
        }
        if let Some(successor) = successor(&own, &replica.candidates().await) {
            tracing::warn!(
                successor,
                slow_for_ms = own.slow_for_ms,
                full = own.full,
                "handing leadership over: the disk here is slow or full and the successor's is not"
            );
            if let Err(failure) = replica.transfer_here(successor).await {
                tracing::warn!(
                    error = failure.message,
                    "leadership stays where the disk is slow or full for now"
                );
            }
        }
        // Asked or not: not again at once.
        led = Some((term, Instant::now()));
    }
}

impl Replica {
    /// The other voters that answer and follow this one: while a disk hangs here, another may have been
    /// elected, and openraft not have come to hear of it.
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

    /// Refuses at once what the others can do and this controller cannot while its disk hangs: openraft
    /// waits for it, so that nothing is applied here, nor known of who leads now.
    pub(super) fn check_disk(&self) -> Result<(), Failure> {
        let disk = Disk::from(self.disk.health());
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

    /// Refuses a command that makes the state larger while the disk here is full. Called where this
    /// controller leads.
    pub(super) fn check_space(&self, command: &Command) -> Result<(), Failure> {
        let grows = matches!(
            command,
            Command::ApplyFunction { .. }
                | Command::ApplyWorkflow { .. }
                | Command::AddArtifact { .. }
                | Command::BeginOperation { .. }
        );
        if !grows || !self.disk.health().full {
            return Ok(());
        }
        let message = format!(
            "the disk of controller {}, which leads, is full: free space on it, or delete functions",
            self.id().0
        );
        Err(Failure::new(Reason::StorageFull, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(slow_syncs: u32, slow_for_ms: u64) -> Disk {
        Disk { slow_syncs, slow_for_ms, last_ms: 300, ..FAST }
    }

    const FAST: Disk =
        Disk { outstanding_ms: 0, slow_for_ms: 0, slow_syncs: 0, last_ms: 5, idle_ms: 0, full: false };

    #[test]
    fn only_a_disk_that_stays_slow_costs_its_leader_the_place() {
        let candidates = BTreeMap::from([(2, Candidate { disk: FAST, lag: Some(0) })]);
        let check = |own: Disk| successor(&own, &candidates);
        assert_eq!(check(FAST), None);
        assert_eq!(check(disk(2, 5_000)), None, "two syncs are too few to tell");
        assert_eq!(check(disk(9, 1_999)), None, "a moment");
        assert_eq!(check(disk(3, 2_000)), Some(2));
    }

    #[test]
    fn the_successor_has_a_fast_disk_and_most_of_the_log() {
        let own = disk(10, 10_000);
        let check = |candidates: &[(u64, Disk, Option<u64>)]| {
            let candidates = candidates.iter().map(|&(id, disk, lag)| (id, Candidate { disk, lag }));
            successor(&own, &candidates.collect())
        };
        assert_eq!(check(&[]), None, "nobody answers");
        assert_eq!(check(&[(2, FAST, Some(9)), (3, FAST, Some(2))]), Some(3));
        assert_eq!(check(&[(2, FAST, Some(9)), (3, disk(1, 200), Some(2))]), Some(2));
        let all_slow = [(2, disk(9, 9_000), Some(0)), (3, disk(1, 200), Some(2))];
        assert_eq!(check(&all_slow), None, "nothing would be better");
        assert_eq!(check(&[(2, FAST, None), (3, FAST, Some(PROMOTION_LAG_MAX + 1))]), None);
    }

    #[test]
    fn a_leader_on_a_full_disk_hands_over_to_one_with_space() {
        let full = Disk { full: true, ..FAST };
        let check = |disk: Disk| successor(&full, &[(2, Candidate { disk, lag: Some(0) })].into());
        assert_eq!(check(FAST), Some(2));
        assert_eq!(check(full), None);
        assert_eq!(check(disk(1, 200)), None);
        assert!(full.warning(3).unwrap().starts_with("the disk of controller 3 is full"));
    }

    #[test]
    fn a_disk_hangs_while_one_sync_does_and_between_two_that_did() {
        let hangs = |outstanding_ms, slow_syncs, last_ms| {
            Disk { outstanding_ms, slow_for_ms: 9_000, slow_syncs, last_ms, idle_ms: 0, full: false }.hangs()
        };
        assert!(!hangs(499, 1, 5), "not yet");
        assert!(hangs(500, 1, 5));
        assert!(!hangs(0, 1, 900), "one that took long and is over");
        assert!(hangs(3, 2, 900), "the next of many");
        assert!(!hangs(250, 9, 300), "slow");
        let idle = Disk { slow_syncs: 9, last_ms: 900, idle_ms: 2_000, ..FAST };
        assert!(!idle.hangs(), "nothing was written since: a write has to tell");
    }

    #[test]
    fn a_slow_disk_is_told_of_and_stands_later() {
        assert_eq!(FAST.warning(2), None);
        let warning = disk(4, 1_200).warning(2).unwrap();
        assert!(warning.contains("controller 2 is slow: its last 4 syncs took over 200ms"), "{warning}");
        assert_eq!(handicap(DiskHealth::default()), Duration::ZERO);
        assert!(handicap(DiskHealth { slow_syncs: 1, ..DiskHealth::default() }) > SILENCE);
    }
}
