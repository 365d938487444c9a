//! Records of a controller, as observed from outside.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use millrace_cluster_state::State;
use millrace_controller::sim::MemberView;
use millrace_raft_store::{ClusterConfig, DataDir, LogId, LogReader};
use millrace_types::{Epoch, NodeName, Timestamp};
use openraft::RaftLogReader as _;
use openraft::storage::RaftLogStorage as _;

use super::controller::Reader;
use crate::history::{FoundLost, Heard, History};

/// The last records of a controller.
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub(super) heard: BTreeMap<NodeName, (Epoch, Timestamp)>,
    pub(super) lost: Vec<(NodeName, Epoch)>,
    /// The last entry after which the controller's state was digested.
    pub(super) digested: u64,
    pub(super) snapshot: Option<LogId>,
}

/// Records the entries that a controller has applied, unless another controller applied the same
/// entries before.
pub(super) fn note_applied(
    history: &mut History,
    at: Duration,
    reader: &Reader,
    before: Option<LogId>,
    last: LogId,
) {
    let from = before.map_or(0, |before| before.index + 1);
    let unseen = |index: &u64| !history.applied.contains_key(index);
    let Some(from) = (from..=last.index).find(unseen) else { return };
    if let Some(reader) = reader.lock().unwrap().as_mut() {
        for entry in read(reader, from..=last.index) {
            history.applied.entry(entry.log_id.index).or_insert((at, entry));
        }
    }
}

/// Records the nodes that a controller heard, and the nodes that it found lost.
pub(super) fn note_fleet(
    history: &mut History,
    marks: &mut Marks,
    at: Duration,
    id: u64,
    watch: &MemberView,
) {
    let heard = watch.heard().into_iter().map(|(node, epoch, heard)| (node, (epoch, heard)));
    let heard: BTreeMap<_, _> = heard.collect();
    for (node, now) in &heard {
        if marks.heard.get(node).is_none_or(|last| last.1 != now.1) {
            history.heard.push(Heard { at, controller: id, node: node.clone(), epoch: now.0 });
        }
    }
    marks.heard = heard;
    let lost = watch.found_lost();
    if let Some(term) = watch.on_duty() {
        for (node, epoch) in lost.iter().filter(|&found| !marks.lost.contains(found)).cloned() {
            history.found_lost.push(FoundLost { at, controller: id, term, node, epoch });
        }
    }
    marks.lost = lost;
}

/// Records a snapshot that a controller took or received. After a received snapshot, the controller's
/// log lacks the last covered entry.
pub(super) fn note_snapshot(history: &mut History, marks: &mut Marks, reader: &Reader, watch: &MemberView) {
    let newest = watch.snapshot();
    if std::mem::replace(&mut marks.snapshot, newest) != newest
        && let (Some(newest), Some(reader)) = (newest, reader.lock().unwrap().as_mut())
    {
        history.snapshots += 1;
        history.installed += usize::from(read(reader, newest.index..=newest.index).is_empty());
    }
}

/// Returns entries of a log that the controller has open.
fn read(
    reader: &mut LogReader<State>,
    range: std::ops::RangeInclusive<u64>,
) -> Vec<openraft::Entry<ClusterConfig>> {
    let read = futures::executor::block_on(reader.try_get_log_entries(range));
    read.expect("reading an open log succeeds")
}

/// Returns the log in a data directory that no process has open.
pub(super) fn log(
    data_dir: &Path,
) -> Result<Vec<openraft::Entry<ClusterConfig>>, Box<dyn std::error::Error>> {
    let dir = DataDir::open(data_dir)?;
    let Some(identity) = dir.identity().cloned() else { return Ok(Vec::new()) };
    let mut store = millrace_raft_store::open::<State>(dir, &identity)?;
    let read = async { store.log.get_log_reader().await.try_get_log_entries(0..).await };
    Ok(futures::executor::block_on(read)?)
}
