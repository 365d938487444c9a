//! This controller's membership in the Raft group.

mod asking;
pub(crate) mod bootstrap;
mod codec;
pub(crate) mod disks;
pub(crate) mod divergence;
pub(crate) mod duties;
pub(crate) mod elections;
pub(crate) mod founding;
#[cfg(test)]
pub(crate) mod group_tests;
mod membership;
mod network;
mod operations;
pub(crate) mod peers;
mod proposer;
pub(crate) mod replica;
mod route;
mod rules;
pub(crate) mod runtime;
pub(crate) mod service;
mod silence;
mod status;
mod time;
mod timing;
mod transfer;
pub(crate) mod unheard;
pub(crate) mod versions;
// Public through `crate::sim`, where that is built.
#[cfg_attr(not(feature = "sim"), allow(unreachable_pub))]
pub(crate) mod world;

use std::sync::Arc;
use std::time::Duration;

use millrace_raft_store::{ClusterConfig, Identity};
use openraft::{Config, SnapshotPolicy};

pub(crate) use peers::{Lane, Peer};
pub(crate) use replica::{Changes, Replica};
pub(crate) use rules::Change;
use world::Snapshots;

pub(crate) type Raft = openraft::Raft<ClusterConfig>;

/// Entries of one AppendEntries call. The log's reader bounds their bytes.
const ENTRIES_PER_CALL_MAX: u64 = 256;
/// How long sending and installing a snapshot may take.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60);

fn config(own: &Identity, snapshots: Snapshots) -> Result<Arc<Config>, bootstrap::Error> {
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let config = Config {
        cluster_name: own.cluster.to_string(),
        heartbeat_interval: millis(timing::HEARTBEAT),
        election_timeout_min: millis(timing::VOTE_TIMEOUT),
        // openraft derives its leader lease from this value.
        election_timeout_max: millis(timing::LEASE),
        enable_elect: false,
        install_snapshot_timeout: millis(SNAPSHOT_TIMEOUT),
        max_payload_entries: ENTRIES_PER_CALL_MAX,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(snapshots.every),
        replication_lag_threshold: snapshots.every.saturating_mul(2),
        max_in_snapshot_log_to_keep: snapshots.kept,
        purge_batch_size: snapshots.purged_at_once,
        ..Config::default()
    };
    config.validate().map(Arc::new).map_err(|error| bootstrap::Error::Raft(error.to_string()))
}
