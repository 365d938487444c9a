//! Tests of failed writes and of full disks. A failed write or sync becomes a storage error, on
//! which openraft halts the node; later writes are not acknowledged, and acknowledged writes are
//! not lost. A full disk fails no write: the log waits for space, and continues.
//!
//! The failed write is caused by the file size limit of a child process: the system call fails in
//! sled's own write as it does without space, with another error number.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use openraft::storage::{RaftLogStorage, RaftLogStorageExt};

use super::tally::{Command, all, append, entries, entry, everything_covered, open_at};
use super::{AGAIN_DIR, again_under};
use crate::log::space::LogSpace;
use crate::log::writer::{DbFile, SyncPoint};
use crate::log::{ExpectedLog, LogBacking, LogStore};
use crate::{RaftStore, Vote};

fn large(index: u64) -> crate::Entry<super::tally::RecordingMachine> {
    entry(1, index, vec![Command::pad(10_000, index)])
}

#[tokio::test]
async fn a_write_that_fails_halts_the_log_and_loses_nothing_acknowledged() {
    if let Ok(dir) = std::env::var(AGAIN_DIR) {
        return fill_the_disk(&dir).await;
    }
    let dir = tempfile::tempdir().unwrap();
    // A process that ignores SIGXFSZ gets an error instead. 4096 is 2 or 4 MiB, depending on the
    // shell's unit.
    let name = "tests::full_disk::a_write_that_fails_halts_the_log_and_loses_nothing_acknowledged";
    let said = again_under("trap '' XFSZ; ulimit -f 4096", name, dir.path());
    let acknowledged: u64 =
        said.lines().find_map(|line| line.split_once("acknowledged ")).unwrap().1.parse().unwrap();
    assert!(acknowledged > 10, "{acknowledged}");

    let RaftStore { mut log, .. } = open_at(dir.path()).unwrap();
    let found = all(&mut log).await;
    assert!(found.len() as u64 >= acknowledged, "{} of {acknowledged}", found.len());
    assert_eq!(found, (0..found.len() as u64).map(large).collect::<Vec<_>>());
    // With space again, the log continues after its last entry.
    let next = found.len() as u64;
    append(&mut log, vec![large(next)]).await;
}

async fn fill_the_disk(dir: &str) {
    let RaftStore { mut log, .. } = open_at(Path::new(dir)).unwrap();
    for index in 0.. {
        let Err(error) = log.blocking_append(vec![large(index)]).await else { continue };
        let message = error.to_string();
        assert!(message.contains("halted"), "{message}");
        // The message must name the disk and its fault.
        assert!(message.contains("File too large") && message.contains(dir), "{message}");
        // Small enough to fit, but still refused.
        log.save_vote(&Vote::new(1, 1)).await.unwrap_err();
        log.blocking_append(entries(index, index + 1)).await.unwrap_err();
        println!("\nacknowledged {index}");
        break;
    }
}

/// Fails a single sync, like a disk that lost a write: Linux reports the loss once, and a second
/// sync succeeds although the data is lost.
struct FailsOnce {
    inner: DbFile,
    until: u32,
}

impl SyncPoint for FailsOnce {
    fn sync(&mut self) -> io::Result<()> {
        self.until = self.until.wrapping_sub(1);
        if self.until == 0 { Err(io::Error::other("the disk lost a write")) } else { self.inner.sync() }
    }
}

#[tokio::test]
async fn a_failed_sync_is_not_retried() {
    let dir = tempfile::tempdir().unwrap();
    // The first sync is that of the opening.
    let backing = |log_dir: &Path| {
        let sync_point = Box::new(FailsOnce { inner: DbFile::open(log_dir)?, until: 3 });
        Ok(LogBacking { sync_point, space: None })
    };
    let mut log =
        LogStore::open_with(dir.path(), ExpectedLog::Nothing, everything_covered(), backing).unwrap();
    append(&mut log, entries(0, 1)).await;
    let failed = log.blocking_append(entries(1, 2)).await.unwrap_err();
    assert!(failed.to_string().contains("the disk lost a write"), "{failed}");
    let halted = log.blocking_append(entries(1, 2)).await.unwrap_err();
    assert!(halted.to_string().contains("the store has halted"), "{halted}");
    assert!(halted.to_string().contains("the disk lost a write"), "{halted}");
    log.save_vote(&Vote::new(9, 1)).await.unwrap_err();
}

/// A disk with this many bytes left, of which fewer than `LOW` count as full.
#[derive(Debug, Clone, Default)]
struct SimSpace(Arc<AtomicU64>);

const LOW: u64 = 10 << 20;

impl SimSpace {
    fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::SeqCst);
    }
}

impl LogSpace for SimSpace {
    fn left(&mut self, _needed: u64) -> io::Result<u64> {
        Ok(self.0.load(Ordering::SeqCst))
    }

    fn low(&self) -> u64 {
        LOW
    }
}

fn log_on(left: &SimSpace, dir: &Path, expect: ExpectedLog) -> LogStore<super::tally::RecordingMachine> {
    let backing = |log_dir: &Path| {
        Ok(LogBacking { sync_point: Box::new(DbFile::open(log_dir)?), space: Some(Box::new(left.clone())) })
    };
    LogStore::open_with(dir, expect, everything_covered(), backing).unwrap()
}

#[tokio::test]
async fn a_log_without_space_waits_and_continues_once_space_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let left = SimSpace::default();
    left.set(u64::MAX);
    let mut log = log_on(&left, dir.path(), ExpectedLog::Nothing);
    let disk = log.disk();
    append(&mut log, entries(0, 1)).await;
    assert!(!disk.health().full);

    left.set(LOW - 1);
    append(&mut log, entries(1, 2)).await;
    assert!(disk.health().full, "the log uses its reserve, so that clients must add nothing");
    left.set(LOW);
    disk.look_for_space();
    assert!(!disk.health().full, "free space is detected although nothing is written");

    left.set(0);
    let waits = async {
        append(&mut log, vec![large(2)]).await;
        log
    };
    let waits = tokio::spawn(waits);
    while disk.health().outstanding.is_zero() {
        tokio::task::yield_now().await;
    }
    assert!(!waits.is_finished());
    left.set(u64::MAX);
    let mut log = waits.await.unwrap();
    log.save_vote(&Vote::new(1, 1)).await.unwrap();
    assert!(!disk.health().full);
    drop(log);
    let mut log = log_on(&left, dir.path(), ExpectedLog::Log);
    assert_eq!(all(&mut log).await, [entries(0, 2), vec![large(2)]].concat());
}

#[tokio::test]
async fn a_log_that_has_to_end_stops_waiting_for_space() {
    let dir = tempfile::tempdir().unwrap();
    let left = SimSpace::default();
    left.set(u64::MAX);
    let mut log = log_on(&left, dir.path(), ExpectedLog::Nothing);
    append(&mut log, entries(0, 1)).await;
    left.set(0);
    let disk = log.disk();
    let refused = tokio::spawn(async move { log.blocking_append(entries(1, 2)).await.map(|()| log) });
    while disk.health().outstanding.is_zero() {
        tokio::task::yield_now().await;
    }
    disk.give_up_waiting();
    let error = refused.await.unwrap().err().unwrap().to_string();
    assert!(
        error.contains("No space left on device") && error.contains(dir.path().to_str().unwrap()),
        "{error}"
    );
}

/// The test leaves the file that sled leaves if it runs out of space while it writes the snapshot
/// of an opening, or if it is killed then.
#[tokio::test]
async fn an_interrupted_opening_does_not_prevent_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("log").join("snap.00000000000FFFFF.generating");
    append(&mut open_at(dir.path()).unwrap().log, entries(0, 3)).await;
    for half in [&b""[..], &b"half of it"[..]] {
        std::fs::write(&snapshot, half).unwrap();
        assert_eq!(all(&mut open_at(dir.path()).unwrap().log).await, entries(0, 3));
        assert!(!snapshot.exists());
    }
}
