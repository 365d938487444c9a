//! A test that repeatedly kills a real process with `kill -9` while it appends, votes, takes
//! snapshots and purges. Each time, all writes that the process reported as acknowledged must be
//! present, in order and without a hole.
//!
//! A killed process loses its own memory, but not the bytes that it passed to the kernel. The test
//! therefore shows that nothing is acknowledged while sled still holds it, and that an interrupted
//! sequence of writes is continued. It shows nothing about the disk: see [`super::power_cut_log`].

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};

use openraft::RaftSnapshotBuilder;
use openraft::storage::{RaftLogStorage, RaftStateMachine};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::tally::{all, append, entries, last_index, open_at, position, seed, tally};
use crate::{RaftStore, Vote};

/// The variables by which the child process learns its directory and its seed.
const DIR: &str = "MILLRACE_TEST_DIR";
const CHILD_SEED: &str = "MILLRACE_TEST_CHILD_SEED";

/// Number of kills in a run of the test.
const ROUNDS: u32 = 20;

#[derive(Debug, Default, Clone, Copy)]
struct Acknowledged {
    /// The end of the acknowledged entries, exclusive.
    end: u64,
    /// The term of the acknowledged vote.
    term: u64,
}

#[test]
fn acknowledged_writes_of_a_killed_process_survive() {
    if let Some(dir) = std::env::var_os(DIR) {
        return work_until_killed(Path::new(&dir));
    }
    let mut rng = StdRng::seed_from_u64(seed());
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = Acknowledged::default();
    for _ in 0..ROUNDS {
        let mut child = child(dir.path(), rng.random());
        let kill_after = rng.random_range(1..120);
        acknowledged = listen(&mut child, kill_after, acknowledged);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(check(dir.path(), acknowledged));
    }
    assert!(acknowledged.end > u64::from(ROUNDS), "{acknowledged:?}");
}

fn child(dir: &Path, seed: u64) -> Child {
    let name = "tests::killed::acknowledged_writes_of_a_killed_process_survive";
    Process::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(DIR, dir)
        .env(CHILD_SEED, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads the acknowledgements of the child, kills the child after `kill_after` of them, and reads
/// the rest of its output.
fn listen(child: &mut Child, kill_after: usize, mut acknowledged: Acknowledged) -> Acknowledged {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut heard = 0;
    for line in lines {
        let line = line.unwrap();
        let number = |what: &str| line.split_once(what).map(|(_, number)| number.parse().unwrap());
        if let Some(end) = number("appended ") {
            acknowledged.end = end;
        } else if let Some(term) = number("voted ") {
            acknowledged.term = term;
        } else {
            continue; // The test harness prints lines too.
        }
        heard += 1;
        if heard == kill_after {
            child.kill().unwrap();
        }
    }
    let status = child.wait().unwrap();
    assert!(heard >= kill_after && !status.success(), "the child ended by itself: {status}");
    acknowledged
}

async fn check(dir: &Path, acknowledged: Acknowledged) {
    let RaftStore { mut log, machine } = open_at(dir).unwrap();
    let state = machine.reader().latest();
    let snapshot_end = state.last.map_or(0, |last| last.index + 1);
    assert_eq!(state.state, tally(snapshot_end));
    let purged = log.get_log_state().await.unwrap().last_purged_log_id.map_or(0, |last| last.index + 1);
    let end = last_index(&mut log).await.map_or(0, |last| last + 1);
    assert!(purged <= snapshot_end, "purged to {purged}, covered to {snapshot_end}");
    assert!(acknowledged.end <= end, "{acknowledged:?}, and the log ends at {end}");
    assert_eq!(all(&mut log).await, entries(purged, end));
    let term = log.read_vote().await.unwrap().map_or(0, |vote| vote.leader_id().term);
    assert!(acknowledged.term <= term, "{acknowledged:?}, and the vote is for term {term}");
}

fn work_until_killed(dir: &Path) {
    let mut rng = StdRng::seed_from_u64(std::env::var(CHILD_SEED).unwrap().parse().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        let RaftStore { mut log, mut machine } = open_at(dir).unwrap();
        let mut end = last_index(&mut log).await.map_or(0, |last| last + 1);
        let mut applied = machine.reader().latest().last.map_or(0, |last| last.index + 1);
        let mut term = log.read_vote().await.unwrap().map_or(0, |vote| vote.leader_id().term);
        let mut out = std::io::stdout();
        loop {
            match rng.random_range(0..20) {
                0 => {
                    term += 1;
                    log.save_vote(&Vote::new_committed(term, 1)).await.unwrap();
                    writeln!(out, "voted {term}").unwrap();
                }
                1 if end > applied => {
                    machine.apply(entries(applied, end)).await.unwrap();
                    applied = end;
                    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
                    log.purge(position(1, end - 1)).await.unwrap();
                }
                _ => {
                    let more = rng.random_range(1..20);
                    append(&mut log, entries(end, end + more)).await;
                    end += more;
                    writeln!(out, "appended {end}").unwrap();
                }
            }
            out.flush().unwrap();
        }
    });
}
