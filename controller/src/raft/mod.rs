//! This controller's place in the Raft group.
//!
//! | module | holds |
//! |---|---|
//! | [`replica`] | reading the state, and proposing changes to it |
//! | [`proposer`] | batches proposals: one fsync for all that waited together |
//! | [`bootstrap`] | the first start of a cluster, and every later one |
//! | [`network`] | calls to the other controllers |
//! | [`service`] | what the other controllers call |
//! | [`codec`] | openraft's messages on the wire, with the handshake on each |

pub(crate) mod bootstrap;
mod codec;
#[cfg(test)]
mod group_tests;
pub(crate) mod network;
mod proposer;
pub(crate) mod replica;
pub(crate) mod service;

use std::sync::Arc;

use millrace_raft_store::ClusterConfig;
use openraft::{Config, SnapshotPolicy};

pub(crate) use replica::Replica;

pub(crate) type Raft = openraft::Raft<ClusterConfig>;

/// A heartbeat, which is also how long a follower may take to append: below that, a busy disk
/// looks like a dead follower.
const HEARTBEAT_MS: u64 = 150;
/// Without a heartbeat for this long a follower stands for election. Wide, because openraft draws
/// it once per process and equal draws tie (openraft#1838).
const ELECTION_MS_MIN: u64 = 600;
const ELECTION_MS_MAX: u64 = 1200;
/// Log entries between snapshots.
const SNAPSHOT_EVERY: u64 = 10_000;
/// Entries kept behind a snapshot, for followers that are a little late.
const ENTRIES_KEPT: u64 = 1_000;
/// Entries given up at a time.
const PURGE_BATCH: u64 = 256;
/// Entries of one AppendEntries call. Their bytes are bounded by the log's reader.
const ENTRIES_PER_CALL_MAX: u64 = 256;

fn config(cluster: &millrace_types::ClusterId) -> Result<Arc<Config>, bootstrap::Error> {
    let config = Config {
        cluster_name: cluster.to_string(),
        heartbeat_interval: HEARTBEAT_MS,
        election_timeout_min: ELECTION_MS_MIN,
        election_timeout_max: ELECTION_MS_MAX,
        max_payload_entries: ENTRIES_PER_CALL_MAX,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(SNAPSHOT_EVERY),
        replication_lag_threshold: 2 * SNAPSHOT_EVERY,
        max_in_snapshot_log_to_keep: ENTRIES_KEPT,
        purge_batch_size: PURGE_BATCH,
        ..Config::default()
    };
    config.validate().map(Arc::new).map_err(|error| bootstrap::Error::Raft(error.to_string()))
}
