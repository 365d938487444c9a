//! Runs a scenario in a child process that finds the double where programs look for the driver.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use serde_json::Value;

/// Variable that names the scenario of a child process.
const SCENARIO: &str = "MILLRACE_DOUBLE_SCENARIO";

/// End of a child process.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) errors: String,
    /// None if the process was aborted.
    pub(crate) report: Option<Value>,
}

/// Returns the scenario that this process has to play, if it is such a child.
pub(crate) fn scenario() -> Option<String> {
    std::env::var(SCENARIO).ok()
}

/// Returns the built library. Cargo builds it beside the tests, or one folder above.
fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("this program has a path");
    let folders = program.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join("libmillrace_cuda_double.so")).find(|library| library.exists())
}

/// Returns a folder in which programs find the double as the driver, or None if it was not built.
pub(crate) fn driver() -> Option<tempfile::TempDir> {
    let Some(library) = library() else {
        println!("skipped: libmillrace_cuda_double.so was not built");
        return None;
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(&library, folder.path().join(name)).expect("a link");
    }
    Some(folder)
}

/// Returns a command that runs this program again with the double.
pub(crate) fn again(driver: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.env("LD_LIBRARY_PATH", driver);
    command
}

/// Runs a scenario of this test program. The program has a test `scenario`, which plays it.
#[allow(dead_code, reason = "one of the tests has its own main function")]
pub(crate) fn run(name: &str, variables: &[(&str, &str)]) -> Option<Outcome> {
    let driver = driver()?;
    let report = driver.path().join("report.json");
    let output = again(driver.path())
        .args(["--exact", "scenario", "--nocapture"])
        .env(SCENARIO, name)
        .env("MILLRACE_DOUBLE_REPORT", &report)
        .envs(variables.iter().copied())
        .output()
        .expect("this program runs");
    let report = std::fs::read(report).ok();
    Some(Outcome {
        status: output.status,
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
        report: report.map(|text| serde_json::from_slice(&text).expect("the report is JSON")),
    })
}
