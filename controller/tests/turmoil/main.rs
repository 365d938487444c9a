//! A group of controllers in a simulation: the real Raft, gRPC, store, workers' streams and leader's
//! duties, over a network, a clock and disks that a seed decides, with faults and stub workers. One
//! invariant per file.
//!
//! | module | holds |
//! |---|---|
//! | [`election_safety`], [`log_matching`], [`state_machine_safety`], [`no_lost_write`], [`epoch_fencing`], [`lease`], [`desired_state`], [`acknowledged_checkpoints`], [`placements_converge`], [`linearizability`] | an invariant, checked on what was seen from outside; and that its check can fail |
//! | [`history`] | what was seen from outside |
//! | [`runs`] | which seeds are run, once for all invariants |
//! | [`group`] | one run |
//! | [`faults`] | what goes wrong |
//! | [`people`], [`workers`], [`late_news`] | who uses the group |
//! | [`replay`] | applies a run's log again |
//! | [`network`], [`disk`] | the simulated machine |
//! | [`slow_disk`], [`unheard`] | whose disk is slow, and who hears nobody, does not lead for long |
//! | [`divergence`] | a controller whose state is corrupt stops |
//! | [`plain`] | three controllers without a seed, for those |
//!
//! Not simulated: the front door and requests (its listener takes the machine's connections and no
//! others), model files (no artifact is ever sent), and clocks that run apart or stand still. Work
//! that the product gives to threads (files of snapshots, opening a store) is done between two
//! moments of simulated time; the log's writer thread is replaced by `raft_store::sim`.
//!
//! A seed decides faults, latencies, disks and what is asked of whom. It does not decide what tokio's
//! `select!` takes first of what is ready at once, nor the order of the dependencies' hash maps: the
//! same seed gives a like history and not the same one. A seed that failed may have to be run a few
//! times until it does again.
//!
//! A few seeds are run by default. More, or one again:
//! ```text
//! MILLRACE_SEEDS=200        cargo test -p millrace-controller --test turmoil
//! MILLRACE_SEEDS=201..=400  cargo test -p millrace-controller --test turmoil
//! MILLRACE_SEED=17          cargo test -p millrace-controller --test turmoil
//! ```

#![allow(clippy::unwrap_used, reason = "tests")]

mod acknowledged_checkpoints;
mod desired_state;
mod disk;
mod divergence;
mod election_safety;
mod epoch_fencing;
mod faults;
mod group;
mod history;
mod late_news;
mod lease;
mod linearizability;
mod log_matching;
mod network;
mod no_lost_write;
mod people;
mod placements_converge;
mod plain;
mod planted;
mod replay;
mod runs;
mod slow_disk;
mod state_machine_safety;
mod unheard;
mod workers;
