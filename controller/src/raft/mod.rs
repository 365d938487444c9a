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
//! | [`elections`] | calls elections; [`timing`] has the timeouts that depend on each other |
//! | [`time`] | stamps commands at a bounded pace, despite jumps of wall clocks |
//! | [`disks`] | hands leadership over when the leader's disk is slow or full |
//! | [`unheard`] | quorum loss: silences a leader that no majority answers, by the [`leader_gate`] |
//! | [`outages`] | logs members that the leader's log does not reach |
//! | [`unfinished_change`] | completes membership changes that were left unfinished |
//! | [`versions`] | switches the cluster to newer rules |
//! | [`divergence`] | stops a controller when its state differs from a majority's |
//! | [`status`] | the status of each controller |
//! | [`peers`] | connections to the other controllers |
//! | [`runtime`] | the threads of Raft |
//! | [`world`] | the network and the disk, real or simulated |
//! | [`settings`] | openraft's node type and settings |
//! | [`network`] | openraft's calls to the other controllers |
//! | [`service`] | answers the calls of the other members |
//! | [`codec`] | messages between controllers, with a handshake on each |
//! | [`error`], [`failures`] | errors of the start; failures of writes and reads |

mod asking;
pub(crate) mod bootstrap;
pub(crate) mod codec;
pub(crate) mod disks;
pub(crate) mod divergence;
pub(crate) mod elections;
mod error;
mod failures;
pub(crate) mod founding;
#[cfg(test)]
pub(crate) mod group_tests;
mod leader_gate;
mod membership;
mod network;
mod operations;
mod outages;
pub(crate) mod peers;
mod proposer;
mod replica;
mod route;
mod rules;
pub(crate) mod runtime;
pub(crate) mod service;
mod settings;
mod status;
mod time;
mod timing;
mod transfer;
pub(crate) mod unfinished_change;
pub(crate) mod unheard;
pub(crate) mod versions;
// Public through `crate::sim`, where that is built.
#[cfg_attr(not(feature = "sim"), allow(unreachable_pub))]
pub(crate) mod world;

pub use error::Error;
pub(crate) use failures::refused;
pub(crate) use peers::{PeerClient, TrafficClass};
pub(crate) use replica::{Replica, ReplicaWatch};
pub(crate) use rules::MembershipRequest;
