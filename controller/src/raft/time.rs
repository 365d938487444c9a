//! The cluster's time: what commands are stamped with.
//!
//! Wall clocks jump: somebody sets one, NTP steps it, a machine is started with a wrong one. In the
//! state time never runs backwards, so that a jump which stamps followed would stay: every client's
//! session over at once (a write that is repeated then would be carried out twice), model files
//! collected between their upload and their use; and, once the clock is right again, time that
//! stands still until it is as late as was said. So stamps follow the leader's wall clock at a
//! bounded pace, by the monotonic clock:
//!
//! ```text
//!   last stamp ── elapsed / 2 ──┬───────────────┬── elapsed × 10 ──▶
//!                               └ the wall clock┘ where it is between the two, else the nearer end
//! ```
//! Every controller hears the stamps that are applied, and goes on from there when it becomes leader:
//! what its own wall clock says does not move time by more than that. Only a controller that has heard
//! nothing since it was started believes its clock, which knows how long it was down.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_cluster_state::{State, UnixMillis};
use millrace_raft_store::StateReader;
use tokio::time::Instant;

use crate::clock::WallClock;

/// How many times as fast as time itself stamps run at most. A session of an hour so lasts six
/// minutes at least, which is long after the last repeat of a write.
const FASTEST: u32 = 10;
/// And how many times as slowly, while the wall clock is behind: they meet all the same.
const SLOWEST: u32 = 2;
/// The part of a pause between two stamps that the pace is counted for: the rest of a long one passes
/// as it does, so that one stamp after an idle day does not move time by ten.
const PACED_MAX: Duration = Duration::from_secs(1);

/// The cluster's time, as this controller knows it. Pure: callers pass the clocks.
#[derive(Debug, Clone, Copy, Default)]
struct ClusterTime {
    /// A time since 1970, and when it was.
    known: Option<(Duration, Instant)>,
    /// The last stamp given here: it comes back once it is applied, and says nothing new.
    given: Option<UnixMillis>,
}

impl ClusterTime {
    /// Takes in another's stamp that was applied. Time goes on from there, or from what it is by the
    /// slowest pace, if that is later: a stamp may have been long on its way.
    fn hear(&mut self, stamp: UnixMillis, now: Instant) {
        if self.given.is_some_and(|given| given >= stamp) {
            return;
        }
        let stamp = Duration::from_millis(stamp.0);
        let least = self.known.map(|(time, at)| time + (now - at) - (now - at).min(PACED_MAX) / SLOWEST);
        self.known = Some((least.map_or(stamp, |least| least.max(stamp)), now));
    }

    /// The time by what was heard and the monotonic clock alone.
    fn estimate(&self, now: Instant) -> Option<Duration> {
        self.known.map(|(time, at)| time + (now - at))
    }

    /// The time when the wall clock says `wall`.
    fn read(&self, wall: UnixMillis, now: Instant) -> Duration {
        let wall = Duration::from_millis(wall.0);
        let Some((time, at)) = self.known else { return wall };
        let (estimate, paced) = (time + (now - at), (now - at).min(PACED_MAX));
        wall.clamp(estimate - paced / SLOWEST, estimate + paced * (FASTEST - 1))
    }

    /// The same, for a stamp: the next one goes on from here.
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

/// Reads and stamps the cluster's time. Cloning shares it.
#[derive(Debug, Clone)]
pub(super) struct Time {
    wall: Arc<dyn WallClock>,
    reader: StateReader<State>,
    /// A lock: the proposer stamps while another task hears, a few words at a time.
    cluster: Arc<Mutex<ClusterTime>>,
}

impl Time {
    pub(super) fn new(wall: Arc<dyn WallClock>, reader: StateReader<State>) -> Self {
        Self { wall, reader, cluster: Arc::default() }
    }

    /// Hears what is applied from now on, until Raft ends. `before` is the last log entry from before
    /// this start: what is applied up to there may have been stamped long ago.
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

    /// The stamp of what is proposed now. Never before the time in the state.
    pub(super) fn stamp(&self) -> UnixMillis {
        let wall = self.wall().max(self.reader.latest().state.clock());
        self.cluster().stamp(wall, Instant::now())
    }

    /// The stamp that something would get if it were proposed now.
    pub(super) fn now(&self) -> UnixMillis {
        let wall = self.wall().max(self.reader.latest().state.clock());
        millis(self.cluster().read(wall, Instant::now()))
    }

    /// How far this machine's clock is ahead of the cluster's time, in milliseconds; negative when it
    /// is behind, and `None` while nothing was heard.
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

    /// Stamps every `every_ms` for `for_ms`, from a wall clock that is `offset_ms` off.
    fn lead(time: &mut ClusterTime, now: &mut Instant, begun: Instant, for_ms: u64, offset_ms: i64) -> u64 {
        let (every_ms, mut last) = (7, 0);
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
        let (mut time, mut now) = (ClusterTime::default(), begun);
        assert_eq!(lead(&mut time, &mut now, begun, 70_000, 0), 70_000);
        // One that drifts, and is a little off at a change of leaders.
        assert_eq!(lead(&mut time, &mut now, begun, 70_000, 40), 140_040);
    }

    #[test]
    fn a_jump_moves_time_by_the_bounded_pace_and_the_way_back_never_stops_it() {
        let begun = Instant::now();
        let (mut time, mut now) = (ClusterTime::default(), begun);
        lead(&mut time, &mut now, begun, 7_000, 0);
        let day = i64::try_from(DAY).unwrap();
        assert_eq!(lead(&mut time, &mut now, begun, 7_000, day), 77_000, "ten times as fast");
        assert_eq!(lead(&mut time, &mut now, begun, 7_000, 0), 80_500, "half as fast");
        assert_eq!(lead(&mut time, &mut now, begun, 7_000, -day), 84_000, "as for any clock that is behind");
        let met = lead(&mut time, &mut now, begun, 140_000, 0);
        assert_eq!(met, 168_000, "in time they meet");
    }

    #[test]
    fn a_new_leader_goes_on_from_what_it_heard_whatever_its_own_clock_says() {
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
    fn what_is_heard_late_or_twice_does_not_move_time() {
        let heard = Instant::now();
        let mut time = ClusterTime::default();
        time.hear(UnixMillis(START), heard);
        let later = heard + Duration::from_millis(100);
        time.hear(UnixMillis(START), later);
        let at = |ms: u64| Some(Duration::from_millis(START + ms));
        assert_eq!(time.estimate(later), at(50), "it does not stand still");
        time.hear(UnixMillis(START + 500), later);
        assert_eq!(time.estimate(later), at(500));
        time.hear(UnixMillis(START + 400), later);
        assert_eq!(time.estimate(later), at(500), "nor run back");
    }

    #[test]
    fn a_follower_keeps_the_leaders_pace_and_goes_on_at_its_own_when_it_leads() {
        let begun = Instant::now();
        let (mut leader, mut now) = (ClusterTime::default(), begun);
        let mut follower = ClusterTime::default();
        let day = i64::try_from(DAY).unwrap();
        // The leader's clock is right, then a day ahead, then right again: it slows down.
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
    fn whoever_heard_nothing_yet_believes_its_clock() {
        let now = Instant::now();
        let mut time = ClusterTime::default();
        assert_eq!(time.read(UnixMillis(START + DAY), now), Duration::from_millis(START + DAY));
        assert_eq!(time.stamp(UnixMillis(START), now), UnixMillis(START));
    }
}
