//! Tests that acknowledged writes survive a restart.

use openraft::storage::{RaftLogStorage, RaftStateMachine, StorageHelper};
use openraft::{RaftLogReader, RaftSnapshotBuilder};

use super::tally::{
    Command, RecordingMachine, all, append, entries, entry, last_index, open_at, open_log, position, tally,
};
use crate::log::ExpectedLog;
use crate::{AppliedState, RaftStore, StateMachine, Vote};

#[tokio::test]
async fn entries_vote_and_commit_position_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    {
        let RaftStore { mut log, .. } = open_at(dir.path()).unwrap();
        append(&mut log, entries(0, 10)).await;
        log.save_vote(&Vote::new_committed(3, 2)).await.unwrap();
        log.save_committed(Some(position(1, 7))).await.unwrap();
    }
    let RaftStore { mut log, .. } = open_at(dir.path()).unwrap();
    assert_eq!(all(&mut log).await, entries(0, 10));
    assert_eq!(log.read_vote().await.unwrap(), Some(Vote::new_committed(3, 2)));
    assert_eq!(log.read_committed().await.unwrap(), Some(position(1, 7)));
}

#[tokio::test]
async fn a_truncated_tail_stays_deleted_and_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    {
        let RaftStore { mut log, .. } = open_at(dir.path()).unwrap();
        append(&mut log, entries(0, 10)).await;
        log.truncate(position(1, 6)).await.unwrap();
        assert_eq!(log.get_log_state().await.unwrap().last_log_id, Some(position(1, 5)));
        append(&mut log, vec![entry(2, 6, vec![Command::Add(66)])]).await;
    }
    let RaftStore { mut log, .. } = open_at(dir.path()).unwrap();
    let mut expected = entries(0, 6);
    expected.push(entry(2, 6, vec![Command::Add(66)]));
    assert_eq!(all(&mut log).await, expected);
}

#[tokio::test]
async fn a_long_tail_of_large_entries_is_truncated_completely() {
    let dir = tempfile::tempdir().unwrap();
    let large: Vec<_> = (0..40).map(|index| entry(1, index, vec![Command::pad(300_000, index)])).collect();
    {
        let mut log = open_log(dir.path(), ExpectedLog::Nothing).unwrap();
        append(&mut log, large.clone()).await;
        log.truncate(position(1, 3)).await.unwrap();
        assert_eq!(all(&mut log).await, large[..3]);
    }
    let mut log = open_log(dir.path(), ExpectedLog::Log).unwrap();
    assert_eq!(all(&mut log).await, large[..3]);
}

#[tokio::test]
async fn large_entries_survive_a_restart_in_the_synced_file() {
    let dir = tempfile::tempdir().unwrap();
    // From below a single part to above the size that sled would move to a file of its own.
    let sizes = [0, 1, 4_000, 4_096, 4_200, 100_000, 131_072, 1_000_000, 10, 300_000];
    let large: Vec<_> = (0..)
        .zip(sizes)
        .map(|(index, size)| entry(1, index, vec![Command::pad(size, index), Command::Add(index)]))
        .collect();
    {
        let mut log = open_log(dir.path(), ExpectedLog::Nothing).unwrap();
        for entry in &large {
            append(&mut log, vec![entry.clone()]).await;
        }
    }
    assert_eq!(std::fs::read_dir(dir.path().join("log/blobs")).unwrap().count(), 0);
    let mut log = open_log(dir.path(), ExpectedLog::Log).unwrap();
    assert_eq!(all(&mut log).await, large);
}

#[tokio::test]
async fn a_read_for_replication_is_bounded_in_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open_log(dir.path(), ExpectedLog::Nothing).unwrap();
    let large: Vec<_> = (0..20).map(|index| entry(1, index, vec![Command::pad(1_000_000, index)])).collect();
    append(&mut log, large).await;
    let read = log.limited_get_log_entries(0, 20).await.unwrap();
    assert_eq!(read.len(), 3, "the entries have 1 MB each, and the bound is 2 MiB");
}

#[tokio::test]
async fn an_append_that_would_leave_a_hole_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open_log(dir.path(), ExpectedLog::Nothing).unwrap();
    append(&mut log, entries(0, 3)).await;
    let refused = openraft::storage::RaftLogStorageExt::blocking_append(&mut log, entries(4, 5)).await;
    assert!(refused.unwrap_err().to_string().contains("hole"));
    assert_eq!(last_index(&mut log).await, Some(2));
}

#[tokio::test]
async fn purged_entries_are_deleted_and_the_others_survive() {
    let dir = tempfile::tempdir().unwrap();
    {
        let mut log = open_log(dir.path(), ExpectedLog::Nothing).unwrap();
        append(&mut log, entries(0, 1_000)).await;
        log.purge(position(1, 899)).await.unwrap();
        assert_eq!(all(&mut log).await, entries(900, 1_000));
    }
    let mut log = open_log(dir.path(), ExpectedLog::Log).unwrap();
    assert_eq!(log.get_log_state().await.unwrap().last_purged_log_id, Some(position(1, 899)));
    assert_eq!(all(&mut log).await, entries(900, 1_000));
    append(&mut log, entries(1_000, 1_001)).await;
    assert_eq!(last_index(&mut log).await, Some(1_000));
}

#[tokio::test]
async fn a_purged_log_does_not_grow() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open_log(dir.path(), ExpectedLog::Nothing).unwrap();
    let mut appended = 0;
    for from in (0..60_000).step_by(100) {
        let batch = (from..from + 100).map(|index| entry(1, index, vec![Command::pad(5_000, index)]));
        append(&mut log, batch.collect()).await;
        appended += 100 * 5_000;
        if from % 1_000 == 900 {
            log.purge(position(1, from)).await.unwrap();
        }
    }
    let size = std::fs::metadata(dir.path().join("log/db")).unwrap().len();
    assert!(size < appended / 2, "{size} bytes hold the rest of {appended}");
}

/// openraft requests a purge right after an installation, without waiting for the installation.
#[tokio::test]
async fn a_purge_waits_for_the_snapshot_that_covers_it() {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut log, mut machine } = open_at(dir.path()).unwrap();
    append(&mut log, entries(0, 10)).await;
    machine.apply(entries(0, 10)).await.unwrap();
    {
        let mut purge = std::pin::pin!(log.purge(position(1, 9)));
        let waits = futures_poll(purge.as_mut()).await;
        assert!(waits, "no snapshot covers entry 9 yet");
        machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
        purge.await.unwrap();
    }
    assert_eq!(all(&mut log).await, vec![]);
}

/// Polls a future once. Returns whether the future is still pending.
async fn futures_poll<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
    std::future::poll_fn(|context| std::task::Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

#[tokio::test]
async fn a_purge_fails_when_no_snapshot_can_cover_it() {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut log, machine } = open_at(dir.path()).unwrap();
    append(&mut log, entries(0, 10)).await;
    drop(machine);
    assert!(log.purge(position(1, 9)).await.is_err());
    assert_eq!(all(&mut log).await, entries(0, 10));
}

#[tokio::test]
async fn snapshot_and_log_give_the_state_of_a_full_replay() {
    let dir = tempfile::tempdir().unwrap();
    {
        let RaftStore { mut log, mut machine } = open_at(dir.path()).unwrap();
        append(&mut log, entries(0, 100)).await;
        machine.apply(entries(0, 60)).await.unwrap();
        machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
        log.purge(position(1, 50)).await.unwrap();
        machine.apply(entries(60, 80)).await.unwrap();
        log.save_committed(Some(position(1, 79))).await.unwrap();
        append(&mut log, entries(100, 110)).await;
    }
    let RaftStore { mut log, mut machine } = open_at(dir.path()).unwrap();
    let reader = machine.reader();
    assert_eq!(reader.latest().last, Some(position(1, 59)), "the snapshot");
    // The call that openraft makes at start.
    StorageHelper::new(&mut log, &mut machine).get_initial_state().await.unwrap();
    assert_eq!(reader.latest().last, Some(position(1, 79)), "the snapshot and the committed log");
    let mut replayed = RecordingMachine::default();
    for index in 0..80 {
        replayed.apply(index, &Command::Add(index));
    }
    assert_eq!(reader.latest().state, replayed);
    assert_eq!(all(&mut log).await, entries(51, 110));
}

#[tokio::test]
async fn a_snapshot_has_the_state_at_its_request() {
    let dir = tempfile::tempdir().unwrap();
    {
        let RaftStore { mut machine, .. } = open_at(dir.path()).unwrap();
        machine.apply(entries(0, 5)).await.unwrap();
        let mut builder = machine.get_snapshot_builder().await;
        machine.apply(entries(5, 9)).await.unwrap();
        let built = builder.build_snapshot().await.unwrap();
        assert_eq!(built.meta.last_log_id, Some(position(1, 4)));
    }
    let RaftStore { machine, .. } = open_at(dir.path()).unwrap();
    assert_eq!(machine.reader().latest().state, tally(5));
}

#[tokio::test]
async fn readers_see_whole_batches_and_keep_earlier_states() {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut machine, .. } = open_at(dir.path()).unwrap();
    let reader = machine.reader();
    let before = reader.latest();
    let mut watch = reader.watch();
    let outcomes = machine.apply(vec![entry(1, 0, vec![Command::Add(5), Command::Add(6)])]).await.unwrap();
    assert_eq!(outcomes, vec![vec![1, 2]], "one outcome per command");
    watch.changed().await.unwrap();
    assert_eq!(*before, AppliedState::default());
    assert_eq!(reader.latest().state, RecordingMachine(vec![(0, 5), (0, 6)]));
    assert_eq!(reader.latest().last, Some(position(1, 0)));
}

#[tokio::test]
async fn a_snapshot_received_in_pieces_is_installed_completely() {
    let from = tempfile::tempdir().unwrap();
    let to = tempfile::tempdir().unwrap();
    let RaftStore { machine: mut leader, .. } = open_at(from.path()).unwrap();
    leader.apply(entries(0, 500)).await.unwrap();
    let sent = leader.get_snapshot_builder().await.build_snapshot().await.unwrap();
    {
        let RaftStore { machine: mut follower, .. } = open_at(to.path()).unwrap();
        let mut received = follower.begin_receiving_snapshot().await.unwrap();
        let mut piece = [0; 1_000];
        let mut at = 0;
        loop {
            let len = sent.snapshot.read_at(at, &mut piece).unwrap();
            if len == 0 {
                break;
            }
            assert!(received.verify().is_err(), "the snapshot is incomplete");
            received.append(&piece[..len]).unwrap();
            at += len as u64;
        }
        assert_eq!(at, sent.snapshot.size().unwrap());
        received.verify().unwrap();
        follower.install_snapshot(&sent.meta, received).await.unwrap();
        assert_eq!(follower.reader().latest().state, tally(500));
    }
    let names: Vec<_> =
        std::fs::read_dir(to.path().join("snapshots")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["00000000000000000499-1.snapshot"], "the received file is removed");
    let RaftStore { machine, .. } = open_at(to.path()).unwrap();
    assert_eq!(machine.reader().latest().state, tally(500));
    assert_eq!(machine.last(), Some(position(1, 499)));
}

#[tokio::test]
async fn a_snapshot_being_sent_stays_readable_after_a_newer_one() {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut machine, .. } = open_at(dir.path()).unwrap();
    machine.apply(entries(0, 5)).await.unwrap();
    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    let sending = machine.get_current_snapshot().await.unwrap().unwrap();
    machine.apply(entries(5, 9)).await.unwrap();
    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    sending.snapshot.verify().unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("snapshots")).unwrap().count(), 1);
}
