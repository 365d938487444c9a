//! Processes that load the double in the place of the driver.

use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use serde_json::Value;

/// Variable that names the test which the process runs.
const TEST: &str = "MILLRACE_DOUBLE_TEST";
/// Line by which a process shows that the test's body ran to its end.
const RAN: &str = "the body ran";

/// Returns the full name of the test that contains the macro.
macro_rules! this_test {
    () => {{
        fn here() {}
        let name = std::any::type_name_of_val(&here);
        let name = name.strip_suffix("::here").unwrap_or(name);
        name.split_once("::").map_or(name, |(_, name)| name)
    }};
}

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) ran: bool,
    pub(crate) stderr: String,
    pub(crate) report: Option<Value>,
}

impl Ended {
    /// Checks that the body ran to its end, and returns the report.
    #[track_caller]
    pub(crate) fn report(&self) -> &Value {
        assert!(self.status.success() && self.ran, "{self:#?}");
        self.report.as_ref().expect("a process that exits writes its report")
    }

    /// Checks that the double aborted the process, and that its message has these parts.
    #[track_caller]
    pub(crate) fn was_aborted(&self, parts: &[&str]) {
        assert_eq!(self.status.signal(), Some(6), "{self:#?}");
        self.said(parts);
    }

    /// Checks that a line of the double has these parts.
    #[track_caller]
    pub(crate) fn said(&self, parts: &[&str]) {
        let says =
            |line: &str| line.starts_with("cuda double: ") && parts.iter().all(|part| line.contains(part));
        assert!(self.stderr.lines().any(says), "{parts:?} is not in {}", self.stderr);
    }
}

/// Returns the built library, which is beside this test.
fn library() -> Option<PathBuf> {
    let name = "libmillrace_cuda_double.so";
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    // Cargo builds into this folder; the folder above has copies, which may be older.
    let places = [deps.join(name), deps.parent().unwrap().join(name)];
    let found = places.into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("skipped: {name} was not built: run 'cargo test --workspace'");
    }
    found
}

/// Runs the body of a test in a process of its own. Returns `None` in that process, and if the library was
/// not built.
pub(crate) fn isolated(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<Ended> {
    if std::env::var(TEST).is_ok_and(|wanted| wanted == test) {
        body();
        println!("{RAN}");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        symlink(library()?, folder.path().join(name)).unwrap();
    }
    let report = folder.path().join("report.json");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("LD_LIBRARY_PATH", folder.path()).env(TEST, test);
    command.env("MILLRACE_DOUBLE_MEMORY", "64MiB").env("MILLRACE_DOUBLE_REPORT", &report);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let ran = String::from_utf8_lossy(&output.stdout).contains(RAN);
    assert!(ran || !output.status.success(), "there is no test {test}");
    let report = std::fs::read(&report).ok().map(|json| serde_json::from_slice(&json).unwrap());
    Some(Ended {
        status: output.status,
        ran,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        report,
    })
}
