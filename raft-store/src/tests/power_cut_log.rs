//! Tests of sled's file as a power cut could leave it: any unsynced sector may be present or not.
//!
//! The test implements the writer's [`SyncPoint`]. Before a sync, the file is compared with its
//! contents at the last sync. Every sector that differs is kept or lost at random, and the length
//! is any length between the two. The store is opened on that image, and must be as it was before
//! or after the write in flight, completely. Only a truncation may be partly done, from the back.
//!
//! Not covered: sled's small files (`conf`, `snap.*`), which sled writes only at start, are used as
//! they are, and a disk that lies about its syncs is not simulated.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use openraft::storage::RaftLogStorage;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::tally::{Command, RecordingMachine, append, entry, everything_covered, position, seed};
use crate::log::writer::{DbFile, SyncPoint};
use crate::log::{ExpectedLog, LogBacking, LogStore};
use crate::sim::torn;
use crate::{Entry, Error, LogId, Vote};

/// Number of writes in a run: enough that sled reuses its segments.
const STEPS: u32 = 300;

/// The power is cut at one in this many syncs.
const ONE_IN: u32 = 12;

/// The contents of a log, as its user sees them.
#[derive(Debug, Clone, Default, PartialEq)]
struct Contents {
    entries: Vec<Entry<RecordingMachine>>,
    vote: Option<Vote>,
    purged: Option<LogId>,
}

impl Contents {
    /// Returns whether the contents are an intermediate state of a truncation, which is done in
    /// steps if it is long.
    fn is_between(&self, before: &Self, after: &Self) -> bool {
        let same = |other: &Self| self.vote == other.vote && self.purged == other.purged;
        same(before)
            && same(after)
            && before.entries.starts_with(&self.entries)
            && self.entries.starts_with(&after.entries)
    }
}

/// The acknowledged contents, and the contents once the write in flight is acknowledged.
#[derive(Debug, Clone, Default)]
struct Acknowledged {
    before: Contents,
    after: Contents,
}

struct Cuts {
    inner: DbFile,
    log_dir: PathBuf,
    /// The file at the last sync, if the power will be cut before the next.
    synced: Option<Vec<u8>>,
    acknowledged: Arc<Mutex<Acknowledged>>,
    rng: StdRng,
    made: Arc<AtomicU32>,
}

impl SyncPoint for Cuts {
    fn sync(&mut self) -> io::Result<()> {
        if let Some(synced) = self.synced.take() {
            let written = fs::read(self.log_dir.join("db"))?;
            let image = cut(&synced, &written, &mut self.rng);
            self.check(&image);
        }
        self.inner.sync()?;
        if self.rng.random_ratio(1, ONE_IN) {
            self.synced = Some(fs::read(self.log_dir.join("db"))?);
        }
        Ok(())
    }
}

impl Cuts {
    fn check(&self, image: &[u8]) {
        let first = self.made.fetch_add(1, Ordering::Relaxed) == 0;
        let dir = tempfile::tempdir().unwrap();
        copy(self.log_dir.parent().unwrap(), dir.path());
        fs::write(dir.path().join("log/db"), image).unwrap();
        // The first sync precedes the identity file.
        let found = read(dir.path(), if first { ExpectedLog::Nothing } else { ExpectedLog::Log });
        let Acknowledged { before, after } = &*self.acknowledged.lock().unwrap();
        match found {
            Ok(found) if found == *before || found == *after || found.is_between(before, after) => {}
            Ok(found) => panic!("{found:#?}\nis neither {before:#?}\nnor {after:#?}"),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Returns the file after a power cut: each sector as at the last sync or as written since.
fn cut(synced: &[u8], written: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let len = rng.random_range(synced.len().min(written.len())..=written.len().max(synced.len()));
    // The share of kept sectors, from mostly lost to mostly kept.
    let kept = rng.random::<f64>();
    torn(synced, written, len, || rng.random_bool(kept))
}

pub(super) fn copy(from: &Path, to: &Path) {
    for item in fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        let to = to.join(item.file_name());
        if item.file_type().unwrap().is_dir() {
            fs::create_dir_all(&to).unwrap();
            copy(&item.path(), &to);
        } else {
            fs::copy(item.path(), to).unwrap();
        }
    }
}

fn read(dir: &Path, expect: ExpectedLog) -> Result<Contents, Error> {
    let log = LogStore::<RecordingMachine>::open(dir, expect, everything_covered())?;
    Ok(Contents { entries: log.read_all()?, vote: log.vote()?, purged: log.purged() })
}

async fn work(log: &mut LogStore<RecordingMachine>, acknowledged: &Mutex<Acknowledged>, rng: &mut StdRng) {
    let mut contents = Contents::default();
    let mut term = 1;
    for _ in 0..STEPS {
        let first = contents.purged.map_or(0, |purged| purged.index + 1);
        let end = first + contents.entries.len() as u64;
        match rng.random_range(0..20) {
            0 => {
                term += 1;
                let vote = Vote::new_committed(term, 1);
                contents.vote = Some(vote);
                acknowledged.lock().unwrap().after = contents.clone();
                log.save_vote(&vote).await.unwrap();
            }
            1 if end > first => {
                let from = rng.random_range(first..end);
                contents.entries.truncate((from - first) as usize);
                acknowledged.lock().unwrap().after = contents.clone();
                log.truncate(position(term, from)).await.unwrap();
            }
            2 if end > first => {
                let upto = contents.entries[rng.random_range(0..contents.entries.len())].log_id;
                contents.entries.retain(|entry| entry.log_id.index > upto.index);
                contents.purged = Some(upto);
                acknowledged.lock().unwrap().after = contents.clone();
                log.purge(upto).await.unwrap();
            }
            _ => {
                let count = *[1, 1, 1, 3, 64].get(rng.random_range(0..5)).unwrap();
                let new: Vec<_> = (end..end + count).map(|index| random_entry(term, index, rng)).collect();
                contents.entries.extend(new.iter().cloned());
                acknowledged.lock().unwrap().after = contents.clone();
                append(log, new).await;
            }
        }
        acknowledged.lock().unwrap().before = contents.clone();
    }
}

fn random_entry(term: u64, index: u64, rng: &mut StdRng) -> Entry<RecordingMachine> {
    let size =
        if rng.random_ratio(1, 50) { rng.random_range(0..150_000) } else { rng.random_range(0..6_000) };
    entry(term, index, vec![Command::Add(index), Command::pad(size, rng.random())])
}

#[test]
fn acknowledged_writes_survive_a_power_cut() {
    let seed = seed();
    let dir = tempfile::tempdir().unwrap();
    let acknowledged = Arc::<Mutex<Acknowledged>>::default();
    let made = Arc::<AtomicU32>::default();
    let backing = {
        let acknowledged = Arc::clone(&acknowledged);
        let made = Arc::clone(&made);
        move |log_dir: &Path| {
            let synced = Some(fs::read(log_dir.join("db")).unwrap());
            let inner = DbFile::open(log_dir)?;
            let log_dir = log_dir.to_owned();
            let rng = StdRng::seed_from_u64(!seed);
            let sync_point = Box::new(Cuts { inner, log_dir, synced, acknowledged, rng, made });
            Ok(LogBacking { sync_point, space: None })
        }
    };
    let mut log =
        LogStore::open_with(dir.path(), ExpectedLog::Nothing, everything_covered(), backing).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(work(&mut log, &acknowledged, &mut StdRng::seed_from_u64(seed)));
    drop(log);
    assert_eq!(read(dir.path(), ExpectedLog::Log).unwrap(), acknowledged.lock().unwrap().before);
    let made = made.load(Ordering::Relaxed);
    eprintln!("{made} power cuts, {} bytes", fs::metadata(dir.path().join("log/db")).unwrap().len());
    assert!(made > 1);
}
