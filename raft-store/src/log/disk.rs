//! How the disk under the log fares: how long its syncs take and whether it has space, for whoever
//! decides what to do about a slow or a full one; and a stall of it on purpose, for tests of that.
//!
//! ```text
//!   writer thread ── began, ended, space ──▶ LogDisk ──▶ health: what is under way, since when it is slow
//!                 ◀─ waits here ───────────     ▲
//!                                               └── stall, clear, give up waiting for space
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::space::LogSpace;

/// A sync that takes so long is a slow one: several times what a busy disk needs.
pub const SYNC_SLOW: Duration = Duration::from_millis(200);

/// How a log's disk fares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskHealth {
    /// How long the sync that is under way has taken so far; zero when there is none.
    pub outstanding: Duration,
    /// How long every sync has been [slow](SYNC_SLOW), the one under way among them; zero when the
    /// last one was not.
    pub slow_for: Duration,
    /// How many of them there were.
    pub slow_syncs: u32,
    /// How long the last sync took that has ended.
    pub last: Duration,
    /// How long ago the last slow one ended, while none is under way.
    pub idle: Duration,
    /// Whether the disk has too little space for the log to grow for clients: of the reserve that the
    /// log keeps, less than half is left.
    pub full: bool,
}

/// A stall: every sync takes longer, for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// How much longer each sync takes.
    pub each_sync: Duration,
    /// How long this goes on. A sync that is stalled when it is over goes on.
    pub left: Duration,
}

/// The disk under one log. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct LogDisk(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The space on it; `None` where space is not looked at. A lock: the writer takes it for each job,
    /// and whoever waits for space to come back now and then.
    space: Mutex<Option<Box<dyn LogSpace>>>,
    /// A lock: the writer takes it twice a sync, which costs nothing beside one.
    syncs: Mutex<Syncs>,
    /// Whether there is a stall: all that a sync looks at while there is none.
    stalls: AtomicBool,
    stall: Mutex<Option<Planned>>,
    /// Told when the stall changes, so that what waits goes on at once.
    changed: Condvar,
    full: AtomicBool,
    /// Whether the log is to end although the disk is full.
    gave_up: Mutex<bool>,
    /// Told when that changes.
    ends: Condvar,
}

#[derive(Debug, Clone, Copy)]
struct Planned {
    each_sync: Duration,
    until: Instant,
}

/// The syncs so far. Pure: callers pass `now`.
#[derive(Debug, Clone, Copy, Default)]
struct Syncs {
    began: Option<Instant>,
    /// When the first of the last slow ones began, and the last of them ended.
    slow: Option<(Instant, Instant)>,
    slow_syncs: u32,
    last: Duration,
}

/// What a sync that ended changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The first slow one.
    Slow(Duration),
    /// The first that was not, after so many.
    FastAgain(u32),
}

impl Syncs {
    fn begin(&mut self, now: Instant) {
        self.began.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) -> Option<Turn> {
        let began = self.began.take()?;
        self.last = now - began;
        if self.last < SYNC_SLOW {
            self.slow = None;
            return Some(std::mem::take(&mut self.slow_syncs)).filter(|&slow| slow > 0).map(Turn::FastAgain);
        }
        self.slow = Some((self.slow.map_or(began, |(since, _)| since), now));
        self.slow_syncs = self.slow_syncs.saturating_add(1);
        (self.slow_syncs == 1).then_some(Turn::Slow(self.last))
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

    /// How the disk fares now.
    #[must_use]
    pub fn health(&self) -> DiskHealth {
        let full = self.0.full.load(Ordering::Relaxed);
        DiskHealth { full, ..self.syncs().health(Instant::now()) }
    }

    /// Ends every wait for space, now and later: a log that is to end while its disk is full halts.
    pub fn give_up_waiting(&self) {
        *self.0.gave_up.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.ends.notify_all();
    }

    /// Waits a moment for space. Says whether to look again: not once the log is to end.
    pub(super) fn wait_for_space(&self, moment: Duration) -> bool {
        let gave_up = self.0.gave_up.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.ends.wait_timeout_while(gave_up, moment, |gave_up| !*gave_up);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Looks whether a disk that was full has space again, also while nothing is written. Blocks for a
    /// few system calls.
    pub fn look_for_space(&self) {
        if self.0.full.load(Ordering::Relaxed)
            && let Err(error) = self.space_left(0)
        {
            tracing::debug!(%error, "the space of the log's disk is not known");
        }
    }

    /// Bytes that the log may write before a write may fail for want of space.
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
                "the disk is full: changes by clients are refused, and the log uses the space reserved for it; free space on the disk"
            ),
            (true, false) => tracing::info!("the disk has space for the log again"),
            _ => {}
        }
    }

    /// Makes every sync take longer for a while, in place of an earlier stall. One that is under way
    /// is not held.
    pub fn stall(&self, stall: Stall) {
        let planned = Planned { each_sync: stall.each_sync, until: Instant::now() + stall.left };
        self.plan(Some(planned));
    }

    /// Ends a stall. What it holds goes on at once.
    pub fn clear(&self) {
        self.plan(None);
    }

    /// The stall that there is.
    #[must_use]
    pub fn stalled(&self) -> Option<Stall> {
        let left = |it: Planned| it.until.saturating_duration_since(Instant::now());
        let planned = (*self.planned())?;
        Some(Stall { each_sync: planned.each_sync, left: left(planned) }).filter(|it| !it.left.is_zero())
    }

    fn plan(&self, planned: Option<Planned>) {
        let mut stall = self.planned();
        *stall = planned;
        self.0.stalls.store(planned.is_some(), Ordering::Relaxed);
        drop(stall);
        self.0.changed.notify_all();
    }

    fn planned(&self) -> MutexGuard<'_, Option<Planned>> {
        self.0.stall.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn syncs(&self) -> MutexGuard<'_, Syncs> {
        self.0.syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sync begins. Blocks while a stall holds it.
    pub(super) fn begin(&self) {
        self.wait_begins();
        if self.0.stalls.load(Ordering::Relaxed) {
            self.wait_out();
        }
    }

    /// What is to end with a sync begins.
    pub(crate) fn wait_begins(&self) {
        self.syncs().begin(Instant::now());
    }

    /// The sync ended, well or not.
    pub(super) fn end(&self) {
        let turn = self.syncs().end(Instant::now());
        match turn {
            Some(Turn::Slow(took)) => {
                tracing::warn!(?took, "the log's disk is slow: every write waits for it");
            }
            Some(Turn::FastAgain(slow)) => tracing::info!(slow, "the log's disk is as fast as before"),
            None => {}
        }
    }

    /// There was no sync in the end.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn forget(&self) {
        self.syncs().began = None;
    }

    fn wait_out(&self) {
        let began = Instant::now();
        let mut stall = self.planned();
        while let Some(Planned { each_sync, until }) = *stall {
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

    /// Syncs that took so long each, one right behind the other, and the time after them.
    fn after(start: Instant, took_ms: &[u64]) -> (Syncs, Instant, Vec<Option<Turn>>) {
        let (mut syncs, mut now) = (Syncs::default(), start);
        let mut turns = Vec::new();
        for &took in took_ms {
            syncs.begin(now);
            now += Duration::from_millis(took);
            turns.push(syncs.end(now));
        }
        (syncs, now, turns)
    }

    #[test]
    fn a_disk_is_slow_since_the_first_of_its_slow_syncs_until_the_first_that_is_not() {
        let start = Instant::now();
        let slow_for = |took: &[u64]| {
            let (syncs, now, _) = after(start, took);
            let health = syncs.health(now + Duration::from_secs(60));
            (u64::try_from(health.slow_for.as_millis()).unwrap(), health.slow_syncs)
        };
        assert_eq!(slow_for(&[]), (0, 0));
        assert_eq!(slow_for(&[5, 199]), (0, 0));
        assert_eq!(slow_for(&[5, SLOW]), (SLOW, 1), "idleness counts for nothing");
        assert_eq!(slow_for(&[SLOW, 5, SLOW, 400]), (700, 2));
        assert_eq!(slow_for(&[SLOW, SLOW, 5]), (0, 0));
        let (.., turns) = after(start, &[5, SLOW, SLOW, 5, 5]);
        let slow = Turn::Slow(Duration::from_millis(SLOW));
        assert_eq!(turns, vec![None, Some(slow), None, Some(Turn::FastAgain(2)), None]);
    }

    #[test]
    fn a_sync_under_way_counts_once_it_is_late() {
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
    fn what_stalls_goes_on_when_the_stall_is_cleared_or_over() {
        let disk = LogDisk::default();
        let long = Duration::from_secs(3600);
        disk.stall(Stall { each_sync: long, left: long });
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

        // Over by itself: each would take an hour, and the stall lasts a moment.
        let moment = Duration::from_millis(20);
        disk.stall(Stall { each_sync: long, left: moment });
        let before = Instant::now();
        disk.begin();
        disk.end();
        assert!(before.elapsed() < long, "{:?}", disk.health());
        assert_eq!(disk.stalled(), None);
    }

    #[test]
    fn each_sync_takes_so_much_longer() {
        let (disk, each_sync) = (LogDisk::default(), Duration::from_millis(10));
        disk.stall(Stall { each_sync, left: Duration::from_secs(3600) });
        for _ in 0..3 {
            disk.begin();
            disk.end();
            assert!(disk.health().last >= each_sync, "{:?}", disk.health());
        }
    }
}
