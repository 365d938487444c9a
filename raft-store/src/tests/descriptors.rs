//! Tests of a process whose clients' connections hold all descriptors: the log continues, and a
//! snapshot is written with the descriptors reserved for storage, or later.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use openraft::storage::{RaftLogStorage, RaftStateMachine};
use openraft::{RaftSnapshotBuilder, Snapshot};
use rustix::io::Errno;

use super::tally::{RecordingMachine, all, append, entries, open_at, tally};
use super::{AGAIN_DIR, again_under};
use crate::fs::{DiskFs, Fs, FsFile};
use crate::{RaftStore, StateMachineStore, Vote};

#[tokio::test]
async fn without_descriptors_the_log_goes_on_and_a_snapshot_is_written() {
    if let Ok(dir) = std::env::var(AGAIN_DIR) {
        return take_every_descriptor(Path::new(&dir)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let name = "tests::descriptors::without_descriptors_the_log_goes_on_and_a_snapshot_is_written";
    again_under("ulimit -n 128", name, dir.path());
    let RaftStore { mut log, machine } = open_at(dir.path()).unwrap();
    assert_eq!(all(&mut log).await, entries(10, 40));
    assert_eq!(machine.last().unwrap().index, 19);
}

async fn take_every_descriptor(dir: &Path) {
    let RaftStore { mut log, mut machine } = open_at(dir).unwrap();
    append(&mut log, entries(0, 10)).await;
    // Starts every thread that the test needs before the descriptors are gone.
    tokio::task::spawn_blocking(|| ()).await.unwrap();
    let mut taken = Vec::new();
    while let Ok(one) = File::open("/dev/null") {
        taken.push(one);
    }
    assert!(taken.len() > 10, "{}", taken.len());

    for index in 10..20 {
        append(&mut log, entries(index, index + 1)).await;
    }
    log.save_vote(&Vote::new(7, 1)).await.unwrap();
    log.truncate(entries(19, 20)[0].log_id).await.unwrap();
    append(&mut log, entries(19, 40)).await;
    machine.apply(entries(0, 20)).await.unwrap();
    let mut builder = machine.get_snapshot_builder().await;
    let Snapshot { meta, snapshot } = builder.build_snapshot().await.unwrap();
    assert_eq!(meta.last_log_id.unwrap().index, 19);
    snapshot.verify().unwrap();
    log.purge(entries(9, 10)[0].log_id).await.unwrap();
    assert!(machine.get_current_snapshot().await.unwrap().is_some());
}

/// The machine's file system, which first refuses operations with these errors, in order.
struct RefusingFs {
    disk: DiskFs,
    refusals: Mutex<VecDeque<Errno>>,
}

impl RefusingFs {
    fn refuses(&self) -> io::Result<()> {
        match self.refusals.lock().unwrap().pop_front() {
            Some(errno) => Err(errno.into()),
            None => Ok(()),
        }
    }
}

impl Fs for RefusingFs {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        self.refuses()?;
        self.disk.create(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        self.refuses()?;
        self.disk.open(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        self.refuses()?;
        self.disk.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.disk.remove(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.refuses()?;
        self.disk.sync_dir(dir)
    }
}

/// Returns a machine whose file system refuses operations from now on.
fn on_scarce(dir: &Path, refusals: &[Errno]) -> (StateMachineStore<RecordingMachine>, Arc<RefusingFs>) {
    let fs = Arc::new(RefusingFs { disk: DiskFs::default(), refusals: Mutex::default() });
    let machine = StateMachineStore::open(fs.clone(), dir.join("snapshots")).unwrap();
    fs.refusals.lock().unwrap().extend(refusals);
    (machine, fs)
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_cannot_be_written_or_opened_is_retried() {
    let dir = tempfile::tempdir().unwrap();
    let (mut machine, fs) = on_scarce(dir.path(), &[Errno::MFILE, Errno::NOSPC, Errno::NFILE]);
    machine.apply(entries(0, 5)).await.unwrap();
    let built = machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    assert_eq!(built.meta.last_log_id.unwrap().index, 4);
    fs.refusals.lock().unwrap().extend([Errno::MFILE, Errno::MFILE]);
    let sent = machine.get_current_snapshot().await.unwrap().unwrap();
    assert_eq!(sent.meta, built.meta);

    // Another controller creates a file, reads the received bytes, and stores the snapshot.
    let other = tempfile::tempdir().unwrap();
    let (mut machine, _) = on_scarce(other.path(), &[Errno::MFILE, Errno::DQUOT, Errno::MFILE]);
    let mut received = machine.begin_receiving_snapshot().await.unwrap();
    let mut bytes = vec![0; usize::try_from(sent.snapshot.size().unwrap()).unwrap()];
    assert_eq!(sent.snapshot.read_at(0, &mut bytes).unwrap(), bytes.len());
    received.append(&bytes).unwrap();
    machine.install_snapshot(&sent.meta, received).await.unwrap();
    assert_eq!(machine.reader().latest().state, tally(5));
}

#[test]
fn a_receiver_without_a_descriptor_refuses_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let (machine, _) = on_scarce(dir.path(), &[Errno::MFILE]);
    let receiver = machine.receiver();
    assert!(receiver.begin().unwrap_err().is_shortage());
    receiver.begin().unwrap();
}
