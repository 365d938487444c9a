//! This controller's place in the Raft group.
//!
//! | module | holds |
//! |---|---|
//! | [`replica`] | the state as it is here, who is in the group and who leads |
//! | [`route`] | writes and linearizable reads, wherever the leader is |
//! | [`proposer`] | batches proposals: one fsync for all that waited together |
//! | [`bootstrap`] | the first start of a cluster or of a member, and every later one |
//! | [`founding`] | which of several that start with nothing begins; [`asking`] for a place |
//! | [`membership`] | joining, promotion, removal; [`rules`] says which are safe |
//! | [`transfer`] | leadership handed over on purpose |
//! | [`elections`] | when this controller stands; [`timing`] says how long silence lasts before |
//! | [`time`] | what commands are stamped with, whatever wall clocks do |
//! | [`disks`] | a leader whose disk is slow hands over |
//! | [`unheard`] | a leader that hears no majority keeps quiet |
//! | [`duties`] | changes of the group that were left half done |
//! | [`versions`] | when the cluster switches to newer rules |
//! | [`divergence`] | a controller whose state differs from the others' stops |
//! | [`status`] | how far each controller is |
//! | [`peers`] | connections to the other controllers |
//! | [`runtime`] | the threads that all of this runs on |
//! | [`world`] | the network and the disk, real or simulated |
//! | [`network`] | openraft's calls to them |
//! | [`service`] | what the other controllers call |
//! | [`codec`] | messages on the wire, with the handshake on each |

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

/// Entries of one AppendEntries call. Their bytes are bounded by the log's reader.
const ENTRIES_PER_CALL_MAX: u64 = 256;
/// How long a snapshot may take to be sent and installed.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60);

fn config(own: &Identity, snapshots: Snapshots) -> Result<Arc<Config>, bootstrap::Error> {
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let config = Config {
        cluster_name: own.cluster.to_string(),
        heartbeat_interval: millis(timing::HEARTBEAT),
        election_timeout_min: millis(timing::VOTE_TIMEOUT),
        // What openraft makes the lease of.
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
