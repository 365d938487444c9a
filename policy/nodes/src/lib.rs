//! Decisions about the nodes of a cluster, as pure state machines.
//!
//! | module | decides |
//! |---|---|
//! | [`placement`] | which functions are placed on which nodes |
//! | [`scaling`] | how many nodes the cluster needs |
//! | [`lease`] | which silent nodes are still believed alive |
//! | [`router`] | which worker gets a request |
//! | [`retries`] | whether a request that a full worker refused is sent to another |
//! | [`index`] | which data a node holds, and which node to ask for other data |
//! | [`checkpoint`] | which soft state a worker reports to the leader, and when |

pub mod checkpoint;
pub mod index;
pub mod lease;
pub mod placement;
pub mod retries;
pub mod router;
pub mod scaling;
