//! Runs a check in a process of its own, so that a check that hangs or breaks its context ends alone.

use std::io::{BufReader, Read as _};
use std::process::{Command, Stdio};
use std::sync::mpsc;

use anyhow::Context as _;
use millrace_device::check::{Check, Findings, Verdict};
use millrace_device::monotonic_now;

use crate::report::CheckReport;

/// Most bytes of a check's findings and of its errors that are read.
const OUTPUT_MAX: u64 = 1 << 20;

/// Runs a check, and ends it at its limit.
pub(crate) fn run(check: &Check) -> anyhow::Result<CheckReport> {
    let began = monotonic_now();
    let program = std::env::current_exe().context("find this program")?;
    let mut child = Command::new(program)
        .args(["--child", &check.number.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start the process of a check")?;
    let (done, ended) = mpsc::channel();
    let output = child.stdout.take().context("the output is a pipe")?;
    let errors = child.stderr.take().context("the errors are a pipe")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let read = BufReader::new(errors).take(OUTPUT_MAX).read_to_string(&mut text);
        read.map(|_| text).unwrap_or_default()
    });
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = BufReader::new(output).take(OUTPUT_MAX).read_to_string(&mut text);
        // Nobody receives after the limit.
        drop(done.send(read.map(|_| text)));
    });
    let output = ended.recv_timeout(check.limit);
    if output.is_err() {
        child.kill().context("end a check that takes too long")?;
    }
    let status = child.wait().context("wait for a check")?;
    let errors = reader.join().unwrap_or_default();
    let seconds = monotonic_now().since(began).as_secs_f64();
    let findings = match output {
        Err(_) => Err(format!("took longer than {} s", check.limit.as_secs())),
        Ok(Ok(text)) if status.success() => serde_json::from_str::<Findings>(&text)
            .map_err(|error| format!("its findings cannot be read: {error}")),
        Ok(_) => Err(match errors.lines().last() {
            Some(line) => line.trim_start_matches("error: ").to_owned(),
            None => format!("ended with {status}"),
        }),
    };
    let (findings, verdict) = match findings {
        Ok(findings) => {
            let verdict = findings.verdict();
            (findings, verdict)
        }
        Err(reason) => (Findings::default(), Verdict::Failed(reason)),
    };
    Ok(CheckReport {
        number: check.number,
        name: check.name.to_owned(),
        decides: check.decides.to_owned(),
        seconds,
        verdict,
        findings,
    })
}
