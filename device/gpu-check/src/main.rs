//! Shows on a machine with an NVIDIA GPU what Millrace builds on: `gpu-check` runs the checks of
//! [`millrace_device::check`], each in a process of its own, and writes a report.

mod child;
mod report;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Parser;
use millrace_device::check::{self, Check, Verdict};
use millrace_device::cuda;
use millrace_device::monotonic_now;

use crate::report::CheckReport;

/// Checks what a GPU and its driver can do for Millrace, and how fast. Changes nothing on the machine.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit status: 0 if no check failed, 1 if one did or there is no driver, 2 for bad usage."
)]
struct Options {
    /// Folder for the results: gpu.jsonl, a line for each check, and gpu.md, the report
    #[arg(long, value_name = "DIR", default_value = "gpu-check")]
    out: PathBuf,
    /// Run only these checks, such as 1,9,16
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    only: Vec<u8>,
    /// Skip the checks that ended in an earlier run with the same --out
    #[arg(long)]
    resume: bool,
    /// Start no check that could end later than this
    #[arg(long, value_name = "TIME", default_value = "8m", value_parser = humantime::parse_duration)]
    budget: Duration,
    /// List the checks
    #[arg(long)]
    list: bool,
    /// Run a single check in this process, and print its findings as JSON
    #[arg(long, hide = true, value_name = "NUMBER")]
    child: Option<u8>,
    /// Play another process of a check
    #[arg(long, hide = true, value_name = "ROLE")]
    role: Option<String>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what the options ask for. Returns whether no check failed.
fn run(options: &Options) -> anyhow::Result<bool> {
    if let Some(role) = &options.role {
        return Ok(check::play(role).map(|()| true)?);
    }
    if let Some(number) = options.child {
        let findings = find(number)?.run()?;
        println!("{}", serde_json::to_string(&findings)?);
        return Ok(true);
    }
    if options.list {
        for check in check::checks() {
            println!("{:>3}  {}: decides {}", check.number, check.name, check.decides);
        }
        return Ok(true);
    }
    for &number in &options.only {
        find(number)?;
    }
    if let Err(missing) = cuda::present() {
        bail!("{missing}: nothing was checked");
    }
    run_checks(options)
}

fn find(number: u8) -> anyhow::Result<&'static Check> {
    let found = check::checks().iter().find(|check| check.number == number);
    found.with_context(|| format!("there is no check {number}: gpu-check --list shows all"))
}

/// Runs the checks, each in a process of its own, and writes the results after each.
fn run_checks(options: &Options) -> anyhow::Result<bool> {
    let began = monotonic_now();
    fs::create_dir_all(&options.out).with_context(|| format!("create {}", options.out.display()))?;
    let results = options.out.join("gpu.jsonl");
    let mut reports = if options.resume { earlier(&results)? } else { Vec::new() };
    let mut lines = OpenOptions::new();
    lines.create(true).write(true).append(options.resume).truncate(!options.resume);
    let mut lines = lines.open(&results).with_context(|| format!("open {}", results.display()))?;
    let mut left = Vec::new();
    for check in check::checks() {
        let wanted = options.only.is_empty() || options.only.contains(&check.number);
        if !wanted || reports.iter().any(|report| report.number == check.number) {
            continue;
        }
        if monotonic_now().since(began) + check.limit > options.budget {
            left.push(check.number.to_string());
            continue;
        }
        let report = child::run(check)?;
        print!("{}", report.summary());
        append(&mut lines, &report)?;
        reports.push(report);
    }
    let page = options.out.join("gpu.md");
    fs::write(&page, report::page(&reports)).with_context(|| format!("write {}", page.display()))?;
    println!("{}", page.display());
    if !left.is_empty() {
        let out = options.out.display();
        println!("time is up: gpu-check --out {out} --resume --only {} runs the rest", left.join(","));
    }
    Ok(!reports.iter().any(|report| matches!(report.verdict, Verdict::Failed(_))))
}

fn append(lines: &mut File, report: &CheckReport) -> anyhow::Result<()> {
    writeln!(lines, "{}", serde_json::to_string(report)?)?;
    lines.sync_data()?;
    Ok(())
}

/// Reads the checks that ended in an earlier run. A last line that was cut off is a check that did
/// not end.
fn earlier(results: &Path) -> anyhow::Result<Vec<CheckReport>> {
    let Ok(file) = File::open(results) else { return Ok(Vec::new()) };
    let mut reports = Vec::new();
    for line in BufReader::new(file).lines() {
        if let Ok(report) = serde_json::from_str(&line?) {
            reports.push(report);
        }
    }
    Ok(reports)
}
