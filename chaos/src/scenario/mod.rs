//! The scenarios. Each consists of a cluster under load, faults, and invariants that have to hold
//! afterwards. A file defines a scenario ([`spec`]). The parts that a file cannot express are in
//! code, under the name that the file `plays`.
//!
//! Every run is judged at its end by the invariants of its file (`judge`). Scenarios in code add
//! their own checks.

mod census;
mod clock_jump;
mod damage;
mod executors;
mod faults;
mod full_disk;
mod ground;
mod hostile;
mod judge;
mod library;
mod options;
mod partition;
mod plan;
mod poison;
mod promise;
mod repair;
mod rounds;
mod run;
mod small_disk;
mod spec;
mod stage;
mod storm;
mod torn_store;
mod victim;
mod watch;

pub use self::library::{all, find};
pub use self::options::{KeepFolders, ScenarioOptions};
pub use self::run::ChaosScenario;
