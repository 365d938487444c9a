//! The chaos harness: real `millrace` processes on loopback, faults from a seed, clients that
//! record every request and answer, and an oracle that judges the records.
//!
//! ```text
//!   scenario ──faults──► cluster: controllers, workers, executors (processes)
//!      │                    ▲            ▲ proxy: cuts and delays links between them
//!      │                    │ SDK        │
//!      └──timeline     load: admin writes and reads, requests, a probe
//!                           │ history: requests and answers, with their times
//!                           ▼
//!                        oracle: checks ──► report: PASS or FAIL, with numbers
//! ```
//!
//! Deliberately absent: any code of the cluster except its client and its wire formats. The harness
//! knows a cluster as its users do.

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
