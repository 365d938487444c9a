//! The cost of a durable append, and the time to open a log.
//!
//! Each measurement alternates with its lower bound: the same bytes appended to a plain file, then
//! `fdatasync`. Run with `cargo bench -p millrace-raft-store`; the directory is that of `TMPDIR`.

#![allow(clippy::disallowed_methods, reason = "a benchmark measures time")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_cluster_state::{CallerName, ControllerId, Proposal, State, StateCommand, UnixMillis};
use millrace_raft_store::{ClusterConfig, DataDir, DirectoryOwner, LogId, LogStore, open};
use millrace_types::{ClusterId, FunctionKey, FunctionName, TenantName};
use openraft::storage::RaftLogStorageExt;
use openraft::{CommittedLeaderId, Entry, EntryPayload};

/// Number of appends of each kind.
const APPENDS: u64 = 1_000;

/// Number of entries in the log that is opened.
const OPENED: u64 = 10_000;

fn entry(index: u64, commands: usize) -> Entry<ClusterConfig> {
    let key = FunctionKey {
        tenant: TenantName::default(),
        name: FunctionName::new(&format!("function-{}", index % 1_000)).unwrap(),
    };
    let proposal = Proposal {
        stamp: UnixMillis(1_700_000_000_000 + index),
        caller: CallerName(Arc::from("operator")),
        idempotency: None,
        command: StateCommand::SetFunctionEnabled { key, enabled: true },
    };
    Entry {
        log_id: LogId::new(CommittedLeaderId::new(1, 1), index),
        payload: EntryPayload::Normal(vec![proposal; commands]),
    }
}

fn identity() -> DirectoryOwner {
    DirectoryOwner {
        cluster: ClusterId(Arc::from("bench")),
        controller: ControllerId(1),
        directory: "d1".to_owned(),
    }
}

async fn timed_append(log: &mut LogStore<State>, entries: Vec<Entry<ClusterConfig>>) -> Duration {
    let started = Instant::now();
    log.blocking_append(entries).await.unwrap();
    started.elapsed()
}

fn timed_plain(file: &mut File, bytes: usize) -> Duration {
    let started = Instant::now();
    file.write_all(&vec![7; bytes]).unwrap();
    file.sync_data().unwrap();
    started.elapsed()
}

fn report(what: &str, mut times: Vec<Duration>, plain: &[Duration]) {
    times.sort();
    let mut plain = plain.to_vec();
    plain.sort();
    let at =
        |times: &[Duration], percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
    let p50 = at(&times, 50);
    let p99 = at(&times, 99);
    let plain_p50 = at(&plain, 50);
    let plain_p99 = at(&plain, 99);
    println!(
        "{what:<36} p50 {p50:6.2} ms   p99 {p99:6.2} ms   plain file {plain_p50:5.2} / {plain_p99:5.2}   ratio {:.2} / {:.2}",
        p50 / plain_p50,
        p99 / plain_p99,
    );
}

async fn measure_appends() {
    let dir = tempfile::tempdir().unwrap();
    let mut plain_file = File::create(dir.path().join("plain")).unwrap();
    let mut log = open::<State>(DataDir::open(dir.path().join("data")).unwrap(), &identity()).unwrap().log;
    let kinds = [
        ("1 entry of 1 command", 1, 1),
        ("1 entry of 64 commands", 1, 64),
        ("64 entries of 1 command", 64, 1),
    ];
    let mut times = [const { Vec::new() }; 3];
    let mut plain = [const { Vec::new() }; 3];
    let mut next = 0;
    for _ in 0..APPENDS {
        for (kind, (_, entries, commands)) in kinds.iter().enumerate() {
            let batch: Vec<_> = (next..next + entries).map(|index| entry(index, *commands)).collect();
            next += entries;
            let bytes = batch.iter().map(|entry| rmp_serde::to_vec_named(entry).unwrap().len()).sum();
            times[kind].push(timed_append(&mut log, batch).await);
            plain[kind].push(timed_plain(&mut plain_file, bytes));
        }
    }
    for ((what, ..), (times, plain)) in kinds.iter().zip(times.into_iter().zip(plain)) {
        report(what, times, &plain);
    }
}

async fn measure_opening() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open::<State>(DataDir::open(dir.path()).unwrap(), &identity()).unwrap();
    for from in (0..OPENED).step_by(100) {
        store.log.blocking_append((from..from + 100).map(|index| entry(index, 1))).await.unwrap();
    }
    drop(store);
    let mut times: Vec<Duration> = (0..5)
        .map(|_| {
            let started = Instant::now();
            drop(open::<State>(DataDir::open(dir.path()).unwrap(), &identity()).unwrap());
            started.elapsed()
        })
        .collect();
    times.sort();
    println!(
        "opening and closing {OPENED} entries: median {:?}, from {:?} to {:?}",
        times[2], times[0], times[4]
    );
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        measure_appends().await;
        measure_opening().await;
    });
}
