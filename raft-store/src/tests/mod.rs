//! Tests of the whole store.
//!
//! | module | what it shows |
//! |---|---|
//! | [`suite`] | openraft's own storage suite |
//! | [`restart`] | what was acknowledged is there after a clean restart; snapshot and log give the state |
//! | [`killed`] | the same after `kill -9` of a real process |
//! | [`power_cut_log`] | the same of sled's file as a power cut could leave it |
//! | [`power_cut_files`] | snapshots and identity, cut after every file operation |
//! | [`damage`] | whatever is damaged, missing or foreign is refused with a clear error |
//! | [`simulated`] | a store in simulated time is the same store |
//! | [`golden`] | what builds of each version of the rules wrote leads to the state that it led to |
//! | [`upgrade`] | builds of different rules over one log, and the digests that compare states |
//! | [`memory`] | a file in memory, for tests of formats |
//! | [`full_disk`] | a write that fails halts the log, and no acknowledgement is lost; a full disk is waited for |
//! | [`descriptors`] | without descriptors the log goes on, and a snapshot is written later |

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
mod tally;
mod upgrade;

use std::path::Path;
use std::process::Command;

/// Tells a test that runs again in a child process which directory to use.
const AGAIN_DIR: &str = "MILLRACE_TEST_DIR";

/// Runs a test of this crate again in a child process, for which a shell first does `limits`. Returns
/// what the child printed.
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
