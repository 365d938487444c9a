//! Programs of this machine that a ground is made with: they have to succeed, and say why they do not.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, bail};

/// Runs a command that has to succeed; its standard output.
pub(super) fn said(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {command:?}"))?;
    Ok(String::from_utf8_lossy(&succeeded(command, output)?.stdout).into_owned())
}

/// What a command gave that has to have succeeded.
pub(super) fn succeeded(command: &Command, output: Output) -> anyhow::Result<Output> {
    if !output.status.success() {
        bail!("{command:?} fails: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output)
}
