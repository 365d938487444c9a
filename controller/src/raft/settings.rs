//! openraft's node type and settings.

use std::sync::Arc;
use std::time::Duration;

use millrace_raft_store::{ClusterConfig, DirectoryOwner};
use openraft::{Config, SnapshotPolicy};

use super::error::Error;
use super::timing::{HEARTBEAT, LEASE, VOTE_TIMEOUT};
use super::world::SnapshotSchedule;

/// A Raft node over the replicated state of the cluster.
pub(crate) type Raft = openraft::Raft<ClusterConfig>;

/// Entries of one AppendEntries call. The log's reader bounds the bytes.
const ENTRIES_PER_CALL_MAX: u64 = 256;
/// The timeout of sending and installing a snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the settings of a member.
pub(super) fn config(own: &DirectoryOwner, snapshots: SnapshotSchedule) -> Result<Arc<Config>, Error> {
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let config = Config {
        cluster_name: own.cluster.to_string(),
        heartbeat_interval: millis(HEARTBEAT),
        election_timeout_min: millis(VOTE_TIMEOUT),
        // openraft derives its leader lease from this value.
        election_timeout_max: millis(LEASE),
        enable_elect: false,
        install_snapshot_timeout: millis(SNAPSHOT_TIMEOUT),
        max_payload_entries: ENTRIES_PER_CALL_MAX,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(snapshots.every),
        replication_lag_threshold: snapshots.every.saturating_mul(2),
        max_in_snapshot_log_to_keep: snapshots.kept,
        purge_batch_size: snapshots.purged_at_once,
        ..Config::default()
    };
    config.validate().map(Arc::new).map_err(|error| Error::Raft(error.to_string()))
}
