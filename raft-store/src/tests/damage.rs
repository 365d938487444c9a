//! Tests that damaged, missing and foreign files are refused with an error that names the next
//! step.

use std::fs;
use std::path::{Path, PathBuf};

use millrace_cluster_state::ControllerId;
use openraft::RaftSnapshotBuilder;
use openraft::storage::{RaftLogStorage, RaftStateMachine};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::tally::{
    RecordingMachine, all, append, entries, identity, last_index, open_at, position, seed, tally,
};
use crate::frame;
use crate::log::record;
use crate::{DataDir, DirectoryOwner, Entry, Error, RaftStore, Vote, open};

/// Creates a store with a vote, a snapshot up to entry 19, and entries 10 to 29.
async fn filled() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut log, mut machine } = open_at(dir.path()).unwrap();
    log.save_vote(&Vote::new_committed(1, 1)).await.unwrap();
    append(&mut log, entries(0, 30)).await;
    machine.apply(entries(0, 20)).await.unwrap();
    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    log.purge(position(1, 9)).await.unwrap();
    dir
}

fn refusal(dir: &Path) -> Error {
    match open_at(dir) {
        Ok(_) => panic!("{} was opened", dir.display()),
        Err(error) => error,
    }
}

fn snapshot_path(dir: &Path) -> PathBuf {
    dir.join("snapshots").join("00000000000000000019-1.snapshot")
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

/// Changes the log in sled while the store is closed.
fn tamper(dir: &Path, change: impl FnOnce(&sled::Tree)) {
    let tables = crate::log::tables::LogTables::open(&dir.join("log")).unwrap();
    change(&tables.logs);
    tables.db.flush().unwrap();
}

#[tokio::test]
async fn a_damaged_snapshot_is_refused() {
    let dir = filled().await;
    let path = snapshot_path(dir.path());
    let good = fs::read(&path).unwrap();
    for at in [0, 9, 20, good.len() / 2, good.len() - 1] {
        flip(&path, at);
        let error = refusal(dir.path());
        assert!(matches!(error, Error::Damaged { .. }), "byte {at}: {error}");
        assert!(error.to_string().contains("with a new id"), "{error}");
        fs::write(&path, &good).unwrap();
    }
    for len in [0, 7, good.len() / 2, good.len() - 1] {
        fs::write(&path, &good[..len]).unwrap();
        assert!(matches!(refusal(dir.path()), Error::Damaged { .. }), "{len} bytes");
    }
    fs::write(&path, &good).unwrap();
    assert_eq!(open_at(dir.path()).unwrap().machine.reader().latest().state, tally(20));
}

#[tokio::test]
async fn a_snapshot_under_another_name_is_refused() {
    let dir = filled().await;
    let path = snapshot_path(dir.path());
    fs::rename(&path, path.with_file_name("00000000000000000020-1.snapshot")).unwrap();
    assert!(matches!(refusal(dir.path()), Error::Damaged { .. }));
}

#[tokio::test]
async fn a_snapshot_of_a_newer_format_is_refused_with_its_format() {
    let dir = filled().await;
    let path = snapshot_path(dir.path());
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 3;
    let end = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
    fs::write(&path, bytes).unwrap();
    let error = refusal(dir.path());
    assert!(matches!(error, Error::UnknownFormat { found: 3, known: 2, .. }), "{error}");
    assert!(error.to_string().contains("or a newer one"), "{error}");
}

#[tokio::test]
async fn a_missing_snapshot_is_not_taken_for_an_empty_state() {
    let dir = filled().await;
    fs::remove_file(snapshot_path(dir.path())).unwrap();
    let error = refusal(dir.path());
    assert!(
        error.to_string().starts_with("a snapshot is missing although the log begins after entry 9"),
        "{error}"
    );
}

#[tokio::test]
async fn every_flipped_byte_of_the_identity_is_detected() {
    let dir = filled().await;
    let path = dir.path().join("identity");
    let good = fs::read(&path).unwrap();
    for at in 0..good.len() {
        flip(&path, at);
        let error = refusal(dir.path());
        assert!(matches!(error, Error::Damaged { .. }), "byte {at}: {error}");
        fs::write(&path, &good).unwrap();
    }
    fs::write(&path, &good[..good.len() - 3]).unwrap();
    assert!(matches!(refusal(dir.path()), Error::Damaged { .. }));
}

#[tokio::test]
async fn a_directory_of_a_newer_format_is_refused_with_its_format() {
    let dir = filled().await;
    let path = dir.path().join("identity");
    let text = fs::read_to_string(&path).unwrap().replace("format 2", "format 3");
    let contents = &text[..text.find("checksum").unwrap()];
    fs::write(&path, format!("{contents}checksum {:08x}\n", crc32fast::hash(contents.as_bytes()))).unwrap();
    assert!(matches!(refusal(dir.path()), Error::UnknownFormat { found: 3, known: 2, .. }));
}

#[tokio::test]
async fn a_directory_of_the_first_format_opens_without_an_id() {
    let dir = filled().await;
    let path = dir.path().join("identity");
    let text = fs::read_to_string(&path).unwrap();
    let contents = text[..text.find("directory d1").unwrap()].replace("format 2", "format 1");
    fs::write(&path, format!("{contents}checksum {:08x}\n", crc32fast::hash(contents.as_bytes()))).unwrap();
    let unnamed = DirectoryOwner { directory: String::new(), ..identity() };
    assert_eq!(DataDir::open(dir.path()).unwrap().identity(), Some(&unnamed));
}

#[tokio::test]
async fn a_directory_in_use_is_refused_with_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_at(dir.path()).unwrap();
    let error = DataDir::open(dir.path()).unwrap_err();
    let expected = format!("is in use by process {}", std::process::id());
    assert!(error.to_string().contains(&expected), "{error}");
    drop(store);
    DataDir::open(dir.path()).unwrap();
}

#[tokio::test]
async fn another_members_directory_is_refused() {
    let dir = filled().await;
    let other = DirectoryOwner { controller: ControllerId(2), ..identity() };
    let error = open::<RecordingMachine>(DataDir::open(dir.path()).unwrap(), &other).map(drop).unwrap_err();
    let expected = "belongs to controller 1 of cluster test-cluster, not to controller 2";
    assert!(error.to_string().contains(expected), "{error}");
    assert_eq!(DataDir::open(dir.path()).unwrap().identity(), Some(&identity()));
}

#[tokio::test]
async fn a_directory_with_a_diverged_state_is_refused_for_good() {
    let dir = tempfile::tempdir().unwrap();
    drop(open_at(dir.path()).unwrap());
    crate::mark_diverged(dir.path(), 3_000).unwrap();
    for _ in 0..2 {
        let error = DataDir::open(dir.path()).unwrap_err();
        assert!(error.to_string().contains("after log entry 3000"), "{error}");
    }
}

#[tokio::test]
async fn a_missing_log_or_identity_is_not_taken_for_a_new_directory() {
    let dir = filled().await;
    fs::rename(dir.path().join("identity"), dir.path().join("identity.bak")).unwrap();
    let error = refusal(dir.path());
    assert!(error.to_string().starts_with("the identity file is missing"), "{error}");
    fs::rename(dir.path().join("identity.bak"), dir.path().join("identity")).unwrap();

    fs::remove_dir_all(dir.path().join("log")).unwrap();
    let error = refusal(dir.path());
    assert!(error.to_string().starts_with("the log is missing"), "{error}");
    fs::create_dir(dir.path().join("log")).unwrap();
    fs::write(dir.path().join("log/db"), "").unwrap();
    assert!(open_at(dir.path()).is_err());
}

#[tokio::test]
async fn a_log_restored_from_an_older_copy_is_detected() {
    let dir = filled().await;
    let older = tempfile::tempdir().unwrap();
    super::power_cut_log::copy(&dir.path().join("log"), older.path());
    append(&mut open_at(dir.path()).unwrap().log, entries(30, 31)).await;
    fs::remove_dir_all(dir.path().join("log")).unwrap();
    fs::create_dir_all(dir.path().join("log/blobs")).unwrap();
    super::power_cut_log::copy(older.path(), &dir.path().join("log"));
    let error = refusal(dir.path());
    assert!(error.to_string().contains("was durable"), "{error}");
}

#[tokio::test]
async fn a_log_record_that_is_not_intact_is_refused() {
    let key = record::key(15);
    for (what, change) in [
        ("a flipped bit", Box::new(|value: &mut Vec<u8>| value[12] ^= 1) as Box<dyn Fn(&mut Vec<u8>)>),
        ("a cut", Box::new(|value| value.truncate(20))),
        ("something else", Box::new(|value| *value = b"something else entirely".to_vec())),
    ] {
        let dir = filled().await;
        tamper(dir.path(), |logs| {
            let mut value = logs.get(key).unwrap().unwrap().to_vec();
            change(&mut value);
            logs.insert(key, value).unwrap();
        });
        let error = refusal(dir.path());
        assert!(matches!(&error, Error::Damaged { what, .. } if what == "log entry 15"), "{what}: {error}");
    }
}

#[tokio::test]
async fn a_hole_in_the_log_is_refused() {
    let dir = filled().await;
    tamper(dir.path(), |logs| drop(logs.remove(record::key(15)).unwrap()));
    let error = refusal(dir.path());
    assert!(error.to_string().contains("entry 15 is missing"), "{error}");
}

#[tokio::test]
async fn a_foreign_key_in_the_log_is_refused() {
    let dir = filled().await;
    let foreign = [&record::key(15)[..], &[0]].concat();
    tamper(dir.path(), |logs| drop(logs.insert(foreign, b"").unwrap()));
    assert!(matches!(refusal(dir.path()), Error::Damaged { .. }));
}

/// A command that a later build might propose.
#[derive(serde::Serialize)]
enum LaterCommand {
    Multiply(u64),
}

#[tokio::test]
async fn an_unknown_command_is_refused_with_the_next_step() {
    let dir = filled().await;
    tamper(dir.path(), |logs| {
        // The same entry with an unknown command.
        let entry: Entry<RecordingMachine> = entries(15, 16).remove(0);
        let mut entry: serde_json::Value = serde_json::to_value(&entry).unwrap();
        entry["payload"] = serde_json::json!({ "Normal": [LaterCommand::Multiply(3)] });
        let body = rmp_serde::to_vec_named(&entry).unwrap();
        for (key, value) in record::encode(15, &body).unwrap() {
            logs.insert(key, value).unwrap();
        }
    });
    // The fault appears at the read: openraft reads every entry behind the snapshot before it
    // starts, or when it replicates or applies the entry.
    let RaftStore { mut log, .. } = open_at(dir.path()).unwrap();
    let error = openraft::RaftLogReader::try_get_log_entries(&mut log, 10..30).await.unwrap_err().to_string();
    assert!(error.contains("log entry 15 holds a command that this build does not know"), "{error}");
    assert!(error.contains("Multiply") && error.contains("newer"), "{error}");
}

#[tokio::test]
async fn a_record_of_a_newer_format_is_refused() {
    let dir = filled().await;
    tamper(dir.path(), |logs| {
        let sealed = frame::seal(3, &record::key(29), b"later");
        let head = [&u32::try_from(sealed.len()).unwrap().to_be_bytes()[..], &sealed].concat();
        logs.insert(record::key(29), head).unwrap();
    });
    assert!(matches!(refusal(dir.path()), Error::UnknownFormat { found: 3, known: 2, .. }));
}

/// sled takes the first unreadable record for the end of its log, and would drop the records behind
/// it.
#[tokio::test]
async fn a_flipped_byte_in_sleds_file_never_loses_an_entry_silently() {
    let mut rng = StdRng::seed_from_u64(seed());
    let dir = filled().await;
    flip_and_open(dir.path(), 100, &mut rng).await;
    // sled begins another segment as it opens again, and stores its recovered state in the first.
    drop(open_at(dir.path()).unwrap());
    flip_and_open(dir.path(), 30, &mut rng).await;
}

async fn flip_and_open(dir: &Path, times: u32, rng: &mut StdRng) {
    let db = fs::read(dir.join("log/db")).unwrap();
    let used = db.iter().rposition(|&byte| byte != 0).unwrap();
    let mut refused = 0;
    let mut unharmed = 0;
    for _ in 0..times {
        let copy = tempfile::tempdir().unwrap();
        super::power_cut_log::copy(dir, copy.path());
        let mut flipped = db.clone();
        flipped[rng.random_range(0..=used)] ^= 1 << rng.random_range(0..8);
        fs::write(copy.path().join("log/db"), flipped).unwrap();
        match open_at(copy.path()) {
            Err(error) => {
                assert!(matches!(error, Error::Damaged { .. } | Error::Missing { .. }), "{error}");
                refused += 1;
            }
            Ok(RaftStore { mut log, .. }) => {
                unharmed += 1;
                assert_eq!(last_index(&mut log).await, Some(29));
                assert_eq!(all(&mut log).await, entries(10, 30));
                assert_eq!(log.read_vote().await.unwrap(), Some(Vote::new_committed(1, 1)));
            }
        }
    }
    eprintln!("{refused} refused, {unharmed} unharmed, of {} bytes", used + 1);
    assert!(refused > 0);
}
