//! A simulated group of controllers: the real Raft, gRPC, store, workers' streams and leader's duties,
//! over a network, a clock and disks that a seed determines, with faults and stub workers. Each
//! invariant has a file.
//!
//! | module | task |
//! |---|---|
//! | [`election_safety`], [`log_matching`], [`state_machine_safety`], [`no_lost_write`], [`epoch_fencing`], [`lease`], [`desired_state`], [`acknowledged_checkpoints`], [`placements_converge`], [`linearizability`] | an invariant, checked on the observations of a run, with tests that its check can fail |
//! | [`history`] | the observations of a run |
//! | [`runs`] | the seeds, each run once for all invariants |
//! | [`group`] | one run |
//! | [`faults`] | the planned faults |
//! | [`people`], [`workers`], [`late_news`] | the users of the group |
//! | [`replay`] | applies a run's log again |
//! | [`network`], [`disk`] | the simulated machine |
//! | [`slow_disk`], [`unheard`] | a leader with a slow disk, or without a quorum, is replaced |
//! | [`divergence`] | a controller with a corrupt state stops |
//! | [`plain`] | three controllers without random faults, for the tests above |
//!
//! Not simulated: the gateway and requests (the gateway's listener accepts only connections of the
//! machine's network), model files (no artifact is ever sent), and clocks that drift or stand still.
//! Work that the product does on other threads (snapshot files, opening a store) is done between two
//! moments of simulated time. `raft_store::sim` replaces the log's writer thread.
//!
//! A seed determines faults, latencies, disk times and requests. A seed determines neither the order in
//! which tokio's `select!` takes branches that are ready at once, nor the order of the dependencies'
//! hash maps. So the same seed gives a similar history, not the same history, and a failing seed may
//! have to run a few times until the next failure.
//!
//! By default a few seeds run. To run more seeds, or one seed again:
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
