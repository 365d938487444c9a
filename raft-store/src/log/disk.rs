//! The health of the disk under the log: the duration of its syncs and its space. The controller
//! decides by it what to do about a slow or full disk. The module can also inject a stall, for
//! tests.
//!
//! ```text
//!   writer thread ── began, ended, space ──▶ LogDisk ──▶ health: pending sync, slow time
//!                 ◀─ waits here ───────────     ▲
//!                                               └── stall, clear, give up waiting for space
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::space::LogSpace;

/// Duration from which a sync counts as slow: several times the need of a busy disk.
pub const SYNC_SLOW: Duration = Duration::from_millis(200);

/// The health of a log's disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskHealth {
    /// The time that the pending sync has taken so far; zero if there is none.
    pub outstanding: Duration,
    /// The time for which every sync has been [slow](SYNC_SLOW), the pending sync included; zero if
    /// the last sync was not slow.
    pub slow_for: Duration,
    /// The number of these slow syncs.
    pub slow_syncs: u32,
    /// The duration of the last completed sync.
    pub last: Duration,
    /// The time since the last slow sync ended, while no sync is pending.
    pub idle: Duration,
    /// Whether the disk has too little space for clients to grow the log: less than half of the
    /// log's reserve is left.
    pub full: bool,
}

/// An injected stall: for a while, every sync takes longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskStall {
    /// The additional duration of each sync.
    pub each_sync: Duration,
    /// The rest of the stall's duration. A sync that is delayed at the stall's end continues at once.
    pub left: Duration,
}

/// The disk under a log. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct LogDisk(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The space of the disk; `None` if the space is not checked. Locked by the writer for each
    /// job, and from time to time by a task that checks whether space is free again.
    space: Mutex<Option<Box<dyn LogSpace>>>,
    /// Locked by the writer twice for each sync, which costs nothing compared with a sync.
    syncs: Mutex<SyncTimes>,
    /// Whether a stall is set. Without one, a sync reads only this flag.
    stalls: AtomicBool,
    stall: Mutex<Option<PlannedStall>>,
    /// Notified when the stall changes, so that delayed syncs react at once.
    changed: Condvar,
    full: AtomicBool,
    /// Whether waits for space are over because the log is to end.
    gave_up: Mutex<bool>,
    /// Notified when that changes.
    ends: Condvar,
}

#[derive(Debug, Clone, Copy)]
struct PlannedStall {
    each_sync: Duration,
    until: Instant,
}

/// The syncs so far. Pure: callers pass `now`.
#[derive(Debug, Clone, Copy, Default)]
struct SyncTimes {
    began: Option<Instant>,
    /// The start of the first and the end of the last sync in the present run of slow syncs.
    slow: Option<(Instant, Instant)>,
    slow_syncs: u32,
    last: Duration,
}

/// A change between slow and fast syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpeedChange {
    /// The first slow sync, with its duration.
    Slow(Duration),
    /// The first fast sync, with the number of slow syncs before it.
    FastAgain(u32),
}

impl SyncTimes {
    fn begin(&mut self, now: Instant) {
        self.began.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) -> Option<SpeedChange> {
        let began = self.began.take()?;
        self.last = now - began;
        if self.last < SYNC_SLOW {
            self.slow = None;
            return Some(std::mem::take(&mut self.slow_syncs))
                .filter(|&slow| slow > 0)
                .map(SpeedChange::FastAgain);
        }
        self.slow = Some((self.slow.map_or(began, |(since, _)| since), now));
        self.slow_syncs = self.slow_syncs.saturating_add(1);
        (self.slow_syncs == 1).then_some(SpeedChange::Slow(self.last))
    }

    fn health(&self, now: Instant) -> DiskHealth {
        let outstanding = self.began.map_or(Duration::ZERO, |began| now - began);
        let late = self.began.filter(|_| outstanding >= SYNC_SLOW).map(|began| (began, now));
        let slow = match (self.slow, late) {
            (Some((since, _)), Some((_, until))) => Some((since, until)),
            (slow, late) => slow.or(late),
        };
        DiskHealth {
            outstanding,
            slow_for: slow.map_or(Duration::ZERO, |(since, until)| until - since),
            slow_syncs: self.slow_syncs + u32::from(late.is_some()),
            last: self.last,
            idle: match (self.began, self.slow) {
                (None, Some((_, until))) => now - until,
                _ => Duration::ZERO,
            },
            full: false,
        }
    }
}

impl LogDisk {
    pub(super) fn new(space: Option<Box<dyn LogSpace>>) -> Self {
        Self(Arc::new(Shared { space: Mutex::new(space), ..Shared::default() }))
    }

    /// Returns the present health of the disk.
    #[must_use]
    pub fn health(&self) -> DiskHealth {
        let full = self.0.full.load(Ordering::Relaxed);
        DiskHealth { full, ..self.syncs().health(Instant::now()) }
    }

    /// Ends every wait for space, now and later. A log that has to end while its disk is full then
    /// halts.
    pub fn give_up_waiting(&self) {
        *self.0.gave_up.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.ends.notify_all();
    }

    /// Waits for `moment`. Returns whether to check the space again, which is false once the log
    /// has to end.
    pub(super) fn wait_for_space(&self, moment: Duration) -> bool {
        let gave_up = self.0.gave_up.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.ends.wait_timeout_while(gave_up, moment, |gave_up| !*gave_up);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Checks whether a full disk has space again, even if nothing is written. Blocks for a few
    /// system calls.
    pub fn look_for_space(&self) {
        if self.0.full.load(Ordering::Relaxed)
            && let Err(error) = self.space_left(0)
        {
            tracing::debug!(%error, "cannot read the free space of the log's disk");
        }
    }

    /// Returns the number of bytes that the log can write before a write may fail for lack of
    /// space.
    pub(super) fn space_left(&self, needed: u64) -> io::Result<u64> {
        let mut space = self.0.space.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(space) = space.as_mut() else { return Ok(u64::MAX) };
        let left = space.left(needed)?;
        self.note_full(left < space.low());
        Ok(left)
    }

    fn note_full(&self, full: bool) {
        match (self.0.full.swap(full, Ordering::Relaxed), full) {
            (false, true) => tracing::error!(
                "the disk is full, so that changes by clients are refused and the log uses its reserved space: free space on the disk"
            ),
            (true, false) => tracing::info!("the disk has space for the log again"),
            _ => {}
        }
    }

    /// Delays every sync for a while, in place of an earlier stall. A sync that is pending is not
    /// delayed.
    pub fn stall(&self, stall: DiskStall) {
        let planned = PlannedStall { each_sync: stall.each_sync, until: Instant::now() + stall.left };
        self.plan(Some(planned));
    }

    /// Ends the stall. Delayed syncs continue at once.
    pub fn clear(&self) {
        self.plan(None);
    }

    /// Returns the present stall.
    #[must_use]
    pub fn stalled(&self) -> Option<DiskStall> {
        let left = |it: PlannedStall| it.until.saturating_duration_since(Instant::now());
        let planned = (*self.planned())?;
        Some(DiskStall { each_sync: planned.each_sync, left: left(planned) }).filter(|it| !it.left.is_zero())
    }

    fn plan(&self, planned: Option<PlannedStall>) {
        let mut stall = self.planned();
        *stall = planned;
        self.0.stalls.store(planned.is_some(), Ordering::Relaxed);
        drop(stall);
        self.0.changed.notify_all();
    }

    fn planned(&self) -> MutexGuard<'_, Option<PlannedStall>> {
        self.0.stall.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn syncs(&self) -> MutexGuard<'_, SyncTimes> {
        self.0.syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the start of a sync. Blocks while a stall delays the sync.
    pub(super) fn begin(&self) {
        self.wait_begins();
        if self.0.stalls.load(Ordering::Relaxed) {
            self.wait_out();
        }
    }

    /// Marks the start of work that ends with a sync.
    pub(crate) fn wait_begins(&self) {
        self.syncs().begin(Instant::now());
    }

    /// Marks the end of a sync, successful or not.
    pub(super) fn end(&self) {
        let turn = self.syncs().end(Instant::now());
        match turn {
            Some(SpeedChange::Slow(took)) => {
                tracing::warn!(?took, "the log's disk is slow: every write waits");
            }
            Some(SpeedChange::FastAgain(slow)) => tracing::info!(slow, "the log's disk is as fast as before"),
            None => {}
        }
    }

    /// Discards the start of work that ended without a sync.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn forget(&self) {
        self.syncs().began = None;
    }

    fn wait_out(&self) {
        let began = Instant::now();
        let mut stall = self.planned();
        while let Some(PlannedStall { each_sync, until }) = *stall {
            let now = Instant::now();
            if now >= until {
                *stall = None;
                self.0.stalls.store(false, Ordering::Relaxed);
                return;
            }
            let left = (began + each_sync).min(until).saturating_duration_since(now);
            if left.is_zero() {
                return;
            }
            let waited = self.0.changed.wait_timeout(stall, left);
            stall = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: u64 = 300;

    /// Runs syncs of these durations back to back, and returns the counts, the time after them and
    /// the changes.
    fn after(start: Instant, took_ms: &[u64]) -> (SyncTimes, Instant, Vec<Option<SpeedChange>>) {
        let mut syncs = SyncTimes::default();
        let mut now = start;
        let mut turns = Vec::new();
        for &took in took_ms {
            syncs.begin(now);
            now += Duration::from_millis(took);
            turns.push(syncs.end(now));
        }
        (syncs, now, turns)
    }

    #[test]
    fn a_disk_is_slow_from_its_first_slow_sync_to_its_next_fast_sync() {
        let start = Instant::now();
        let slow_for = |took: &[u64]| {
            let (syncs, now, _) = after(start, took);
            let health = syncs.health(now + Duration::from_secs(60));
            (u64::try_from(health.slow_for.as_millis()).unwrap(), health.slow_syncs)
        };
        assert_eq!(slow_for(&[]), (0, 0));
        assert_eq!(slow_for(&[5, 199]), (0, 0));
        assert_eq!(slow_for(&[5, SLOW]), (SLOW, 1), "idle time does not count");
        assert_eq!(slow_for(&[SLOW, 5, SLOW, 400]), (700, 2));
        assert_eq!(slow_for(&[SLOW, SLOW, 5]), (0, 0));
        let (.., turns) = after(start, &[5, SLOW, SLOW, 5, 5]);
        let slow = SpeedChange::Slow(Duration::from_millis(SLOW));
        assert_eq!(turns, vec![None, Some(slow), None, Some(SpeedChange::FastAgain(2)), None]);
    }

    #[test]
    fn a_pending_sync_counts_as_slow_once_it_is_late() {
        let (mut syncs, now, _) = after(Instant::now(), &[5]);
        syncs.begin(now);
        let at = |ms| syncs.health(now + Duration::from_millis(ms));
        assert_eq!((at(199).slow_syncs, at(199).slow_for), (0, Duration::ZERO));
        let late = at(1000);
        let second = Duration::from_secs(1);
        assert_eq!((late.outstanding, late.slow_for, late.slow_syncs), (second, second, 1));
        assert_eq!(late.last, Duration::from_millis(5));
    }

    #[test]
    fn a_delayed_sync_continues_when_the_stall_is_cleared_or_over() {
        let disk = LogDisk::default();
        let long = Duration::from_secs(3600);
        disk.stall(DiskStall { each_sync: long, left: long });
        assert_eq!(disk.stalled().map(|it| it.each_sync), Some(long));
        std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                disk.begin();
                disk.end();
            });
            while disk.health().outstanding.is_zero() {
                std::thread::yield_now();
            }
            disk.clear();
            held.join().unwrap();
        });
        assert_eq!(disk.stalled(), None);

        // The stall ends by itself: a sync would be delayed by an hour, but the stall lasts a
        // moment.
        let moment = Duration::from_millis(20);
        disk.stall(DiskStall { each_sync: long, left: moment });
        let before = Instant::now();
        disk.begin();
        disk.end();
        assert!(before.elapsed() < long, "{:?}", disk.health());
        assert_eq!(disk.stalled(), None);
    }

    #[test]
    fn a_stall_delays_each_sync_by_its_duration() {
        let disk = LogDisk::default();
        let each_sync = Duration::from_millis(10);
        disk.stall(DiskStall { each_sync, left: Duration::from_secs(3600) });
        for _ in 0..3 {
            disk.begin();
            disk.end();
            assert!(disk.health().last >= each_sync, "{:?}", disk.health());
        }
    }
}
