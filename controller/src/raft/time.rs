//! The cluster's time, which stamps commands.
//!
//! Wall clocks jump: an operator sets the clock, NTP steps the clock, a machine starts with a wrong
//! time. Time in the state never runs backwards, so a jump that stamps followed would be permanent. All
//! client sessions would expire at once, so a repeated write would execute twice. Model files would be
//! collected between upload and use. And once the clock is right again, time would stand still until
//! the clock catches up. So stamps follow the leader's wall clock at a bounded pace, measured by the
//! monotonic clock:
//!
//! ```text
//!   last stamp ── elapsed / 2 ──┬───────────────┬── elapsed × 10 ──▶
//!                               └ the wall clock┘ where it is between the two, else the nearer end
//! ```
//! Every controller follows the applied stamps, and continues from the last stamp as leader: the wall
//! clock moves time only within the bounded pace. A controller without a stamp since the start trusts
//! the wall clock, which includes the time that the process was down.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_cluster_state::{State, UnixMillis};
use millrace_raft_store::StateReader;
use tokio::time::Instant;

use crate::clock::WallClock;

/// The fastest pace of stamps, as a multiple of real time. A session of one hour then lasts at least
/// six minutes, which is long after the last repeat of a write.
const FASTEST: u32 = 10;
/// The slowest pace of stamps, as a divisor of real time, while the wall clock is behind. The two still
/// meet.
const SLOWEST: u32 = 2;
/// The part of a pause between two stamps to which the bounded pace applies; the rest passes in real
/// time. Otherwise, a single stamp after an idle day could move time by ten days.
const PACED_MAX: Duration = Duration::from_secs(1);

/// The cluster's time as known to this controller. Pure: callers pass the clocks.
#[derive(Debug, Clone, Copy, Default)]
struct ClusterTime {
    /// A time since 1970, and the monotonic time of the reading.
    known: Option<(Duration, Instant)>,
    /// The last stamp of this controller, to ignore that stamp when the entry is applied.
    given: Option<UnixMillis>,
}

impl ClusterTime {
    /// Records an applied stamp of another controller. Time continues from the stamp, or from the
    /// slowest-pace estimate if that is later, because the stamp may have been delayed.
    fn hear(&mut self, stamp: UnixMillis, now: Instant) {
        if self.given.is_some_and(|given| given >= stamp) {
            return;
        }
        let stamp = Duration::from_millis(stamp.0);
        let least = self.known.map(|(time, at)| time + (now - at) - (now - at).min(PACED_MAX) / SLOWEST);
        self.known = Some((least.map_or(stamp, |least| least.max(stamp)), now));
    }

    /// Returns the time by the recorded stamps and the monotonic clock alone.
    fn estimate(&self, now: Instant) -> Option<Duration> {
        self.known.map(|(time, at)| time + (now - at))
    }

    /// Returns the time when the wall clock shows `wall`.
    fn read(&self, wall: UnixMillis, now: Instant) -> Duration {
        let wall = Duration::from_millis(wall.0);
        let Some((time, at)) = self.known else { return wall };
        let estimate = time + (now - at);
        let paced = (now - at).min(PACED_MAX);
        wall.clamp(estimate - paced / SLOWEST, estimate + paced * (FASTEST - 1))
    }

    /// Returns the time like [`Self::read`], and records this time as the base of the next stamp.
    fn stamp(&mut self, wall: UnixMillis, now: Instant) -> UnixMillis {
        let time = self.read(wall, now);
        self.known = Some((time, now));
        let stamp = millis(time);
        self.given = Some(stamp);
        stamp
    }
}

fn millis(time: Duration) -> UnixMillis {
    UnixMillis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Reads and stamps the cluster's time. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct StampClock {
    wall: Arc<dyn WallClock>,
    reader: StateReader<State>,
    /// The cluster's time. A lock guards it for a few instructions, because the proposer stamps while
    /// another task follows.
    cluster: Arc<Mutex<ClusterTime>>,
}

impl StampClock {
    pub(super) fn new(wall: Arc<dyn WallClock>, reader: StateReader<State>) -> Self {
        Self { wall, reader, cluster: Arc::default() }
    }

    /// Follows the stamps applied from now on, until Raft ends. `before` is the last log entry from
    /// before this start: entries up to it may be old.
    pub(super) async fn follow(self, before: u64) {
        let mut states = self.reader.watch();
        while states.changed().await.is_ok() {
            let (index, clock) = {
                let applied = states.borrow_and_update();
                (applied.state.applied_index(), applied.state.clock())
            };
            if index > before {
                self.cluster().hear(clock, Instant::now());
            }
        }
    }

    /// Returns the stamp of a proposal made now, never earlier than the time in the state.
    pub(super) fn stamp(&self) -> UnixMillis {
        let wall = self.wall().max(self.reader.latest().state.clock());
        self.cluster().stamp(wall, Instant::now())
    }

    /// Returns the stamp that a proposal made now would get.
    pub(super) fn now(&self) -> UnixMillis {
        let wall = self.wall().max(self.reader.latest().state.clock());
        millis(self.cluster().read(wall, Instant::now()))
    }

    /// Returns the offset of this machine's clock from the cluster's time, in milliseconds. Positive is
    /// ahead; `None` before the first stamp.
    pub(super) fn ahead_ms(&self) -> Option<i64> {
        let cluster = millis(self.cluster().estimate(Instant::now())?);
        let ahead = i128::from(self.wall().0) - i128::from(cluster.0);
        Some(i64::try_from(ahead).unwrap_or(if ahead < 0 { i64::MIN } else { i64::MAX }))
    }

    fn wall(&self) -> UnixMillis {
        self.wall.now()
    }

    fn cluster(&self) -> MutexGuard<'_, ClusterTime> {
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 1_700_000_000_000;
    const DAY: u64 = 24 * 3600 * 1000;

    /// Stamps every 7 ms for `for_ms`, with a wall clock that is `offset_ms` off. Returns the last
    /// stamp, relative to `START`.
    fn lead(time: &mut ClusterTime, now: &mut Instant, begun: Instant, for_ms: u64, offset_ms: i64) -> u64 {
        let every_ms = 7;
        let mut last = 0;
        for _ in 0..for_ms / every_ms {
            *now += Duration::from_millis(every_ms);
            let true_ms = START + u64::try_from((*now - begun).as_millis()).unwrap();
            last = time.stamp(UnixMillis(true_ms.saturating_add_signed(offset_ms)), *now).0;
        }
        last - START
    }

    #[test]
    fn a_right_clock_is_followed_to_the_millisecond() {
        let begun = Instant::now();
        let mut time = ClusterTime::default();
        let mut now = begun;
        assert_eq!(lead(&mut time, &mut now, begun, 70_000, 0), 70_000);
        // This clock drifts, and is a little off at a change of leaders.
        assert_eq!(lead(&mut time, &mut now, begun, 70_000, 40), 140_040);
    }

    #[test]
    fn a_clock_jump_moves_time_at_the_bounded_pace_and_its_correction_never_stops_time() {
        let begun = Instant::now();
        let mut time = ClusterTime::default();
        let mut now = begun;
        lead(&mut time, &mut now, begun, 7_000, 0);
        let day = i64::try_from(DAY).unwrap();
        assert_eq!(lead(&mut time, &mut now, begun, 7_000, day), 77_000, "ten times as fast");
        assert_eq!(lead(&mut time, &mut now, begun, 7_000, 0), 80_500, "half as fast");
        assert_eq!(lead(&mut time, &mut now, begun, 7_000, -day), 84_000, "as for any clock that is behind");
        let met = lead(&mut time, &mut now, begun, 140_000, 0);
        assert_eq!(met, 168_000, "in time they meet");
    }

    #[test]
    fn a_new_leader_continues_from_the_applied_stamps_regardless_of_its_clock() {
        let heard = Instant::now();
        let later = heard + Duration::from_secs(3600);
        for wall in [START - DAY, START, START + 3_600_000, START + DAY] {
            let mut time = ClusterTime::default();
            time.hear(UnixMillis(START), heard);
            let stamp = time.stamp(UnixMillis(wall), later).0 - START;
            let bounds = 3_600_000 - 500..=3_600_000 + 9_000;
            assert!(bounds.contains(&stamp), "{stamp} by a clock at {wall}");
        }
    }

    #[test]
    fn a_late_or_repeated_stamp_does_not_move_time() {
        let heard = Instant::now();
        let mut time = ClusterTime::default();
        time.hear(UnixMillis(START), heard);
        let later = heard + Duration::from_millis(100);
        time.hear(UnixMillis(START), later);
        let at = |ms: u64| Some(Duration::from_millis(START + ms));
        assert_eq!(time.estimate(later), at(50), "time does not stand still");
        time.hear(UnixMillis(START + 500), later);
        assert_eq!(time.estimate(later), at(500));
        time.hear(UnixMillis(START + 400), later);
        assert_eq!(time.estimate(later), at(500), "time does not run backwards");
    }

    #[test]
    fn a_follower_follows_the_leaders_pace_and_continues_at_its_own_as_leader() {
        let begun = Instant::now();
        let mut leader = ClusterTime::default();
        let mut now = begun;
        let mut follower = ClusterTime::default();
        let day = i64::try_from(DAY).unwrap();
        // The leader's clock is right, then a day ahead, then right again, so the pace slows down.
        for offset in [0, day, 0] {
            for _ in 0..500 {
                let stamp = START + lead(&mut leader, &mut now, begun, 7, offset);
                follower.hear(UnixMillis(stamp), now + Duration::from_millis(5));
                leader.hear(UnixMillis(stamp), now + Duration::from_millis(5));
            }
            let apart = leader
                .estimate(now)
                .unwrap()
                .abs_diff(follower.estimate(now + Duration::from_millis(5)).unwrap());
            assert!(apart <= Duration::from_millis(5), "{apart:?}");
        }
        let before = follower.estimate(now).unwrap();
        now += Duration::from_millis(100);
        let stamp = follower.stamp(UnixMillis(START + DAY), now);
        assert!(Duration::from_millis(stamp.0) <= before + Duration::from_millis(1_000), "no leap");
    }

    #[test]
    fn a_controller_without_a_stamp_trusts_its_clock() {
        let now = Instant::now();
        let mut time = ClusterTime::default();
        assert_eq!(time.read(UnixMillis(START + DAY), now), Duration::from_millis(START + DAY));
        assert_eq!(time.stamp(UnixMillis(START), now), UnixMillis(START));
    }
}
