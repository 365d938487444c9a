//! This controller's membership in the Raft group.
//!
//! | module | task |
//! |---|---|
//! | [`replica`] | the local copy of the state, the members and the leader |
//! | [`route`] | writes and linearizable reads, forwarded to the leader |
//! | [`proposer`] | batches proposals: one sync for all commands that waited together |
//! | [`bootstrap`] | the first start of a cluster or of a member, and every later start |
//! | [`founding`] | cluster bootstrap of several empty controllers; [`asking`] sends join requests |
//! | [`membership`] | joins, promotions and removals; [`rules`] decides which are safe |
//! | [`operations`] | records membership changes as operations |
//! | [`transfer`] | leadership transfer |
//! | [`elections`] | calls elections; [`timing`] has the election timeout |
//! | [`time`] | stamps commands at a bounded pace, despite jumps of wall clocks |
//! | [`disks`] | hands leadership over when the leader's disk is slow or full |
//! | [`unheard`] | quorum loss: silences a leader that no majority answers |
//! | [`silence`] | logs members that the leader's log does not reach |
//! | [`duties`] | completes membership changes that were left unfinished |
//! | [`versions`] | switches the cluster to newer rules |
//! | [`divergence`] | stops a controller when its state differs from a majority's |
//! | [`status`] | the status of each controller |
//! | [`peers`] | connections to the other controllers |
//! | [`runtime`] | the threads of Raft |
//! | [`world`] | the network and the disk, real or simulated |
//! | [`network`] | openraft's calls to the other controllers |
//! | [`service`] | the service for the other controllers |
//! | [`codec`] | messages between controllers, with a handshake on each |

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

use millrace_raft_store::{ClusterConfig, DirectoryOwner};
use openraft::{Config, SnapshotPolicy};

pub(crate) use peers::{PeerClient, TrafficClass};
pub(crate) use replica::{Replica, ReplicaWatch};
pub(crate) use rules::MembershipRequest;
use world::SnapshotSchedule;

pub(crate) type Raft = openraft::Raft<ClusterConfig>;

/// Entries of one AppendEntries call. The log's reader bounds the bytes.
const ENTRIES_PER_CALL_MAX: u64 = 256;
/// The timeout of sending and installing a snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(60);

fn config(own: &DirectoryOwner, snapshots: SnapshotSchedule) -> Result<Arc<Config>, bootstrap::Error> {
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
