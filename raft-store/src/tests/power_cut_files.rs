//! Tests of snapshots and the identity file under power cuts. The power is cut after every single
//! operation in turn, and unsynced data is lost, kept or torn in each way of [`Loss`]. Afterwards
//! either the old or the new file is there, complete; the new file is there if its write was
//! reported as done.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use openraft::RaftSnapshotBuilder;
use openraft::storage::RaftStateMachine;

use super::sim_fs::{Loss, SimFs};
use super::tally::{RecordingMachine, entries, identity, tally};
use crate::data_dir::{DirectoryOwner, read_identity, write_identity};
use crate::fs::Fs;
use crate::{Error, StateMachineStore};

fn shared(fs: &SimFs) -> Arc<dyn Fs> {
    Arc::new(fs.clone())
}

fn open(fs: &SimFs) -> Result<StateMachineStore<RecordingMachine>, Error> {
    StateMachineStore::open(shared(fs), PathBuf::from("/data/snapshots"))
}

/// Returns the number of entries in the newest snapshot.
fn recovered(fs: &SimFs) -> Result<u64, Error> {
    let state = open(fs)?.reader().latest().state.clone();
    let count = state.0.len() as u64;
    assert_eq!(state, tally(count));
    Ok(count)
}

/// Numbers of entries in the snapshots of [`take_three`].
const STEPS: [u64; 4] = [0, 3, 7, 20];

/// Takes three snapshots. Returns the number that were reported as done before the power cut.
async fn take_three(fs: &SimFs) -> usize {
    let Ok(mut machine) = open(fs) else { return 0 };
    for (done, step) in STEPS.windows(2).enumerate() {
        machine.apply(entries(step[0], step[1])).await.unwrap();
        if machine.get_snapshot_builder().await.build_snapshot().await.is_err() {
            return done;
        }
    }
    STEPS.len() - 1
}

#[tokio::test]
async fn a_power_cut_leaves_the_old_or_the_new_snapshot() {
    let whole = SimFs::default();
    assert_eq!(take_three(&whole).await, 3);
    for operations in 0..=whole.operations() {
        let fs = SimFs::default();
        fs.cut_after(operations);
        let done = take_three(&fs).await;
        for loss in Loss::ALL {
            let survived = fs.after_power_cut(loss);
            let context = format!("{operations} operations, {loss:?}: {:?}", survived.tree().keys());
            let count = recovered(&survived).unwrap_or_else(|error| panic!("{context}: {error}"));
            let next = (done + 1).min(STEPS.len() - 1);
            assert!([STEPS[done], STEPS[next]].contains(&count), "{context}: {count} entries, {done} done");
            // A snapshot that was read once is not lost at the next power cut.
            assert_eq!(recovered(&survived.after_power_cut(Loss::All)).unwrap(), count, "{context}");
        }
    }
}

#[tokio::test]
async fn a_power_cut_leaves_a_received_snapshot_installed_or_absent() {
    let leader_fs = SimFs::default();
    let mut leader = open(&leader_fs).unwrap();
    leader.apply(entries(0, 30)).await.unwrap();
    let sent = leader.get_snapshot_builder().await.build_snapshot().await.unwrap();
    let mut bytes = vec![0; sent.snapshot.size().unwrap() as usize];
    assert_eq!(sent.snapshot.read_at(0, &mut bytes).unwrap(), bytes.len());

    for operations in 0.. {
        let fs = SimFs::default();
        let mut follower = open(&fs).unwrap();
        follower.apply(entries(0, 5)).await.unwrap();
        follower.get_snapshot_builder().await.build_snapshot().await.unwrap();
        fs.cut_after(operations);
        let installed = async {
            let mut received = follower.begin_receiving_snapshot().await.ok()?;
            received.append(&bytes[..10]).ok()?;
            received.append(&bytes[10..]).ok()?;
            follower.install_snapshot(&sent.meta, received).await.ok()
        };
        let installed = installed.await.is_some();
        for loss in Loss::ALL {
            let count = recovered(&fs.after_power_cut(loss)).unwrap();
            assert!(
                count == 30 || count == 5 && !installed,
                "{operations} operations, {loss:?}: {count} entries"
            );
        }
        if installed {
            assert!(operations > 5, "the power was cut before, between and after the operations");
            break;
        }
    }
}

#[test]
fn a_power_cut_leaves_no_identity_or_a_complete_one() {
    let dir = Path::new("/data");
    let whole = SimFs::default();
    write_identity(&whole, dir, &identity()).unwrap();
    for operations in 0..=whole.operations() {
        let fs = SimFs::default();
        fs.cut_after(operations);
        let written = write_identity(&fs, dir, &identity()).is_ok();
        for loss in Loss::ALL {
            let found: Option<DirectoryOwner> = read_identity(&fs.after_power_cut(loss), dir).unwrap();
            assert!(
                found == Some(identity()) || found.is_none() && !written,
                "{operations} operations, {loss:?}"
            );
        }
    }
}
