//! A group of controllers in a simulation: the real Raft, gRPC and store, over a network, a clock
//! and disks that a seed decides, with faults. One invariant per file.
//!
//! | module | holds |
//! |---|---|
//! | [`election_safety`], [`log_matching`], [`state_machine_safety`], [`no_lost_write`], [`epoch_fencing`], [`linearizability`] | an invariant, checked on what was seen from outside; and that its check can fail |
//! | [`history`] | what was seen from outside |
//! | [`runs`] | which seeds are run, once for all invariants |
//! | [`group`] | one run |
//! | [`faults`] | what goes wrong |
//! | [`people`], [`workers`] | who uses the group |
//! | [`network`], [`disk`] | the simulated machine |
//! | [`slow_disk`] | whose disk is slow does not lead for long |
//!
//! A few seeds are run by default. More, or one again:
//! ```text
//! MILLRACE_SEEDS=200 cargo test -p millrace-controller --test turmoil
//! MILLRACE_SEED=17   cargo test -p millrace-controller --test turmoil
//! ```

#![allow(clippy::unwrap_used, reason = "tests")]

mod disk;
mod election_safety;
mod epoch_fencing;
mod faults;
mod group;
mod history;
mod linearizability;
mod log_matching;
mod network;
mod no_lost_write;
mod people;
mod planted;
mod runs;
mod slow_disk;
mod state_machine_safety;
mod workers;
