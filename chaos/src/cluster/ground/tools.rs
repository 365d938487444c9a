//! External programs that make a ground. The programs have to succeed; an error contains their output.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, bail};

/// Runs a command that has to succeed, and returns its standard output.
pub(super) fn run_for_output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {command:?}"))?;
    Ok(String::from_utf8_lossy(&check_success(command, output)?.stdout).into_owned())
}

/// Returns the output of a command that has to have succeeded.
pub(super) fn check_success(command: &Command, output: Output) -> anyhow::Result<Output> {
    if !output.status.success() {
        bail!("{command:?} fails: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output)
}
