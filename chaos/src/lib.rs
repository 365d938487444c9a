//! Chaos: real `millrace` processes on loopback, faults from a seed, clients that record all they
//! asked and heard, and an oracle that judges it.
//!
//! ```text
//!   scenario ──faults──► cluster: controllers, workers, executors (processes)
//!      │                    ▲            ▲ proxy: cuts and delays links between them
//!      │                    │ SDK        │
//!      └──timeline     load: admin writes and reads, requests, a probe
//!                           │ history: what was asked and heard, and when
//!                           ▼
//!                        oracle: checks ──► report: PASS or FAIL, with numbers
//! ```
//!
//! Deliberately absent: anything of the cluster's own code but its client and its wire formats. The
//! harness knows a cluster as its users do.

pub mod cluster;
pub mod history;
pub mod hostile;
pub mod load;
pub mod oracle;
pub mod proxy;
pub mod report;
pub mod scenario;
pub mod timeline;

mod clock;
