use std::ops::Bound;

use millrace_types::{Digest, Epoch, MemoryTier};

use super::*;
use crate::StateCommand;
use crate::commands::testing::{
    TestLog, alphas, counts, data, delete, holding, key, node_name, scored, sync, sync_all,
};
use crate::index::DataLocation;

const DELTA: SyncPart = SyncPart::Delta;
const FIRST: SyncPart = SyncPart::Full(SyncPortion::First);
const MIDDLE: SyncPart = SyncPart::Full(SyncPortion::Middle);
const LAST: SyncPart = SyncPart::Full(SyncPortion::Last);

fn lost(node: &str, epoch: u64) -> StateCommand {
    StateCommand::NodeLost { name: node_name(node), epoch: Epoch(epoch) }
}

fn gone(counters: &[u64]) -> NodeDelta {
    NodeDelta { entries_gone: counters.iter().map(|&it| data(it)).collect(), ..NodeDelta::default() }
}

fn held(home: &str, holders: &[&str]) -> DataLocation {
    let holders = holders.iter().map(|name| node_name(name)).collect();
    DataLocation::Held { home: node_name(home), holders, bytes: Bytes(100) }
}

fn locate(log: &TestLog, counter: u64) -> DataLocation {
    log.state.locate(&data(counter))
}

fn usage(gpu_ns: u64, requests: u64) -> Usage {
    Usage { gpu_ns, requests, idle_ms: 7 * gpu_ns }
}

fn used(function: &str, gpu_ns: u64, requests: u64) -> NodeDelta {
    NodeDelta { usage: vec![(key(function), usage(gpu_ns, requests))], ..NodeDelta::default() }
}

#[test]
fn the_next_batch_is_applied_an_older_one_acknowledged_and_a_gap_asks_for_a_full_sync() {
    let mut log = TestLog::with_two_nodes();
    assert_eq!(
        log.apply(sync("n1", 1, 1, DELTA, holding(&[9]))),
        Ok(CommandEffect::ResyncWanted { last: 0 })
    );
    assert_eq!(log.apply(sync_all("n1", 1, 1, holding(&[1, 2]))), Ok(CommandEffect::Synced { seq: 1 }));
    assert_eq!(log.apply(sync("n1", 1, 2, DELTA, holding(&[3]))), Ok(CommandEffect::Synced { seq: 2 }));
    let before = log.state.clone();
    let version = log.state.version();
    for seq in [1, 2] {
        let repeat = sync("n1", 1, seq, DELTA, gone(&[1, 2, 3]));
        assert_eq!(log.apply(repeat), Ok(CommandEffect::SyncRepeated { last: 2 }));
    }
    assert_eq!(log.apply(sync("n1", 1, 4, DELTA, gone(&[1]))), Ok(CommandEffect::ResyncWanted { last: 2 }));
    assert_eq!(log.state.checkpoint(&node_name("n1")), before.checkpoint(&node_name("n1")));
    assert_eq!(log.state.version(), version, "a checkpoint does not change the version");
    assert_eq!(log.apply(sync_all("n1", 1, 4, holding(&[3]))), Ok(CommandEffect::Synced { seq: 4 }));
    assert_eq!((locate(&log, 1), locate(&log, 3)), (DataLocation::Unknown, held("n1", &["n1"])));
}

#[test]
fn a_checkpoint_of_another_epoch_or_of_a_lost_node_is_fenced() {
    let mut log = TestLog::with_two_nodes();
    let fenced = |name: &str, epoch, current: Option<u64>| CommandRefusal::Fenced {
        name: node_name(name),
        epoch: Epoch(epoch),
        current: current.map(Epoch),
    };
    assert_eq!(log.refused(sync_all("n1", 2, 1, holding(&[1]))), fenced("n1", 2, Some(1)));
    assert_eq!(log.refused(sync_all("n9", 1, 1, holding(&[1]))), fenced("n9", 1, None));
    log.apply(lost("n1", 1)).unwrap();
    assert_eq!(log.refused(sync_all("n1", 1, 1, holding(&[1]))), fenced("n1", 1, None));
}

#[test]
fn a_checkpoint_with_too_many_items_or_impossible_counts_is_refused() {
    let mut log = TestLog::with_two_nodes();
    let more = (0..=SYNC_ITEMS_MAX as u64).collect::<Vec<_>>();
    for delta in [holding(&more), scored("f", 2, 1), scored("f", 0, COUNT_MAX + 1)] {
        let refused = log.refused(sync_all("n1", 1, 1, delta));
        assert!(matches!(refused, CommandRefusal::InvalidCheckpoint { .. }), "{refused}");
    }
}

#[test]
fn a_full_sync_removes_old_items_with_its_last_portion() {
    let mut log = TestLog::with_two_nodes();
    log.apply(sync_all("n1", 1, 1, holding(&[1, 2, 3]))).unwrap();
    log.apply(sync("n1", 1, 2, FIRST, holding(&[2]))).unwrap();
    assert_eq!(locate(&log, 1), held("n1", &["n1"]), "not confirmed yet, and there");
    let out_of_turn = log.apply(sync("n1", 1, 3, DELTA, holding(&[9])));
    assert_eq!(out_of_turn, Ok(CommandEffect::ResyncWanted { last: 2 }));
    log.apply(sync("n1", 1, 3, MIDDLE, holding(&[4]))).unwrap();
    assert_eq!(locate(&log, 4), held("n1", &["n1"]), "at once");
    log.apply(sync("n1", 1, 4, LAST, holding(&[5]))).unwrap();
    let there = (1..=5).filter(|&it| locate(&log, it) != DataLocation::Unknown).collect::<Vec<_>>();
    assert_eq!(there, [2, 4, 5]);
    let late = log.apply(sync("n1", 1, 5, LAST, holding(&[6])));
    assert_eq!(late, Ok(CommandEffect::ResyncWanted { last: 4 }), "none is under way");
}

#[test]
fn a_restarted_full_sync_forgets_its_first_portions() {
    let mut log = TestLog::with_two_nodes();
    log.apply(sync("n1", 1, 1, FIRST, holding(&[1]))).unwrap();
    log.apply(sync("n1", 1, 5, FIRST, holding(&[2]))).unwrap();
    log.apply(sync("n1", 1, 6, LAST, gone(&[]))).unwrap();
    assert_eq!((locate(&log, 1), locate(&log, 2)), (DataLocation::Unknown, held("n1", &["n1"])));
    let checkpoint = log.state.checkpoint(&node_name("n1")).unwrap();
    assert_eq!((checkpoint.knowledge, checkpoint.is_syncing()), (CheckpointCoverage::Whole, false));
}

#[test]
fn data_of_a_lost_node_is_located_on_a_replica_or_lost() {
    let mut log = TestLog::with_two_nodes();
    log.apply(sync_all("n1", 1, 1, holding(&[1, 2]))).unwrap();
    log.apply(sync_all("n2", 2, 1, holding(&[2]))).unwrap();
    assert_eq!(locate(&log, 2), held("n1", &["n1", "n2"]), "its home is asked first");
    log.apply(lost("n1", 1)).unwrap();
    assert_eq!(locate(&log, 1), DataLocation::Lost { bytes: Bytes(100) });
    assert_eq!(locate(&log, 2), held("n2", &["n2"]));
    assert_eq!(locate(&log, 3), DataLocation::Unknown);
    // The node returns and still holds the data, but the state waits for its report.
    log.register("n1", "a", Bytes::gib(1)).unwrap();
    assert_eq!(locate(&log, 1), DataLocation::Lost { bytes: Bytes(100) });
    log.apply(sync_all("n1", 3, 1, holding(&[1]))).unwrap();
    assert_eq!(locate(&log, 1), held("n1", &["n1"]));
    log.apply(sync("n1", 3, 2, DELTA, gone(&[1]))).unwrap();
    assert_eq!(locate(&log, 1), DataLocation::Unknown, "dropped by its last holder");
}

#[test]
fn models_alphas_and_overflow_of_a_checkpoint_are_stored() {
    let mut log = TestLog::with_two_nodes();
    let copy = |tier| ModelCopy { digest: Digest::of(b"m"), tier };
    let delta = NodeDelta {
        models: vec![(copy(MemoryTier::Host), Bytes(7))],
        alphas: Some(alphas(500_000)),
        overflow: Some(3),
        ..NodeDelta::default()
    };
    log.apply(sync_all("n1", 1, 1, delta)).unwrap();
    let models = vec![(copy(MemoryTier::Gpu(millrace_types::GpuIndex(1))), Bytes(7))];
    let moved = NodeDelta { models, models_gone: vec![copy(MemoryTier::Host)], ..NodeDelta::default() };
    log.apply(sync("n1", 1, 2, DELTA, moved.clone())).unwrap();
    let checkpoint = log.state.checkpoint(&node_name("n1")).unwrap();
    assert_eq!(
        checkpoint.models.iter().map(|(copy, bytes)| (*copy, *bytes)).collect::<Vec<_>>(),
        moved.models
    );
    assert_eq!((checkpoint.alphas.clone(), checkpoint.overflow), (alphas(500_000), 3));
}

#[test]
fn usage_is_billed_once_and_outlives_its_node_and_its_function() {
    let mut log = TestLog::with_two_nodes();
    log.apply(sync_all("n1", 1, 1, used("f", 10, 1))).unwrap();
    log.apply(sync_all("n1", 1, 2, used("f", 30, 3))).unwrap();
    log.apply(sync_all("n1", 1, 3, used("f", 20, 2))).unwrap();
    assert_eq!(log.state.usage(&key("f")), usage(30, 3), "merged by the larger");
    log.apply(lost("n1", 1)).unwrap();
    log.register("n1", "a", Bytes::gib(1)).unwrap();
    log.apply(sync_all("n1", 3, 1, used("f", 5, 1))).unwrap();
    log.apply(delete("f")).unwrap();
    log.apply(sync("n1", 3, 2, DELTA, used("f", 6, 1))).unwrap();
    let all = usage(36, 4);
    assert_eq!(log.state.usage(&key("f")), all);
    assert_eq!(log.state.bills(Bound::Unbounded).map(|(_, usage)| usage).collect::<Vec<_>>(), [all]);
    log.apply(sync("n1", 3, 3, DELTA, used("never", 6, 1))).unwrap();
    assert_eq!(log.state.usage(&key("never")), Usage::default());
}

#[test]
fn scores_are_summed_over_nodes_and_merged_by_maximum() {
    let mut log = TestLog::with_two_nodes();
    log.apply(sync_all("n1", 1, 1, scored("f", 4, 6))).unwrap();
    log.apply(sync("n1", 1, 2, DELTA, scored("f", 3, 5))).unwrap();
    log.apply(sync_all("n2", 2, 1, scored("f", 1, 1))).unwrap();
    assert_eq!(log.state.score(&key("f")).total, counts(5, 7));
}

#[test]
fn entries_beyond_the_bound_are_counted_and_dropped() {
    let mut log = TestLog::with_two_nodes();
    let name = node_name("n1");
    let mut checkpoint = NodeCheckpoint {
        seq: 1,
        knowledge: CheckpointCoverage::Whole,
        ..NodeCheckpoint::for_epoch(Epoch(1))
    };
    checkpoint.entries =
        (0..INDEX_ENTRIES_PER_NODE_MAX as u64).map(|counter| (data(counter), Bytes(100))).collect();
    log.state.checkpoints.insert(name.clone(), Arc::new(checkpoint));
    log.state.rebuild_index();
    let beyond = INDEX_ENTRIES_PER_NODE_MAX as u64;
    log.apply(sync("n1", 1, 2, DELTA, holding(&[5, beyond, beyond + 1]))).unwrap();
    let checkpoint = log.state.checkpoint(&name).unwrap();
    assert_eq!((checkpoint.entries.len(), checkpoint.dropped), (INDEX_ENTRIES_PER_NODE_MAX, 2));
    assert_eq!(locate(&log, beyond), DataLocation::Unknown);
    assert_eq!(log.state.check_invariants(), Ok(()));
    log.apply(lost("n1", 1)).unwrap();
    assert_eq!(log.state.index_lost_len(), INDEX_ENTRIES_PER_NODE_MAX);
}
