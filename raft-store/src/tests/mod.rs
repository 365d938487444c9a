//! Tests of the whole store.
//!
//! | module | subject |
//! |---|---|
//! | [`suite`] | openraft's own storage suite |
//! | [`restart`] | acknowledged writes survive a clean restart; snapshot and log give the state |
//! | [`killed`] | acknowledged writes survive `kill -9` of a real process |
//! | [`power_cut_log`] | acknowledged writes survive in sled's file as a power cut could leave it |
//! | [`power_cut_files`] | snapshots and identity survive a power cut after every file operation |
//! | [`damage`] | damaged, missing and foreign files are refused with a clear error |
//! | [`simulated`] | a store in simulated time is the same store |
//! | [`golden`] | files of each version of the rules still lead to their state |
//! | [`upgrade`] | builds of different rules over the same log, and the digests that compare states |
//! | [`memory`] | a file in memory, for tests of formats |
//! | [`full_disk`] | a failed write halts the log and loses no acknowledged write; a full disk only delays writes |
//! | [`descriptors`] | without descriptors the log continues, and a snapshot is written later |

mod damage;
mod descriptors;
mod full_disk;
mod golden;
mod killed;
pub(crate) mod memory;
mod power_cut_files;
mod power_cut_log;
mod restart;
mod sim_fs;
mod simulated;
mod suite;
pub(crate) mod tally;
mod upgrade;

use std::path::Path;
use std::process::Command;

/// The variable by which a test, run again in a child process, learns its directory.
const AGAIN_DIR: &str = "MILLRACE_TEST_DIR";

/// Runs a test of this crate again in a child process, in which a shell first sets `limits`.
/// Returns the output of the child.
fn again_under(limits: &str, test: &str, dir: &Path) -> String {
    let output = Command::new("sh")
        .args(["-c", &format!("{limits}; exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(AGAIN_DIR, dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    said
}
