//! `millrace-experiments`: runs the papers' experiments and prints the papers' figures beside ours.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use millrace_experiments::statuses::{self, JUDGED_SEEDS, StatusRecord};
use millrace_experiments::{Effort, Experiment, all};

/// Runs the papers' experiments on the simulator, and prints each figure beside its claim.
///
/// Exit status: 0 if each figure and order has the status that figures.json records; 1 if one differs; 2 if nothing
/// was judged, because fewer than five seeds or a part of the workload ran. With other seeds than the recorded ones
/// a status differs only if the whole 95% interval excludes it.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Experiments to run: H03, H07, …, or all.
    #[arg(required = true)]
    experiments: Vec<String>,
    /// Number of seeds.
    #[arg(long, default_value_t = Effort::FULL.seeds, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// The first seed; the others follow it.
    #[arg(long, default_value_t = Effort::FULL.first_seed, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    first_seed: u64,
    /// Run only a part of each workload, to check that it runs. Figures are not judged.
    #[arg(long)]
    short: bool,
    /// Write each figure and order as JSON to this file, with mean, interval, band and status.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Record the statuses of these experiments: replace their entries in this file (benches/experiments/figures.json).
    #[arg(long, value_name = "FILE", conflicts_with = "short")]
    record: Option<PathBuf>,
    /// Write the report of each experiment to this folder, as ID.md.
    #[arg(long, value_name = "DIR")]
    reports: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let effort = Effort { first_seed: args.first_seed, seeds: args.seeds, short: args.short };
    if args.record.is_some() && effort.seeds < JUDGED_SEEDS {
        bail!("--record needs at least {JUDGED_SEEDS} seeds: fewer have no status");
    }
    let committed = statuses::committed()?;
    // Files are opened before the runs, which may take an hour.
    let recorded = args.record.as_deref().map(read).transpose()?;
    let mut json = args.json.as_ref().map(File::create).transpose().context("--json")?;
    if let Some(dir) = &args.reports {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    let mut measured = Vec::new();
    let mut exit = 0;
    for Experiment { id, title, run } in chosen(&args.experiments)? {
        let report = run(effort).with_context(|| id.to_owned())?;
        let text = report.markdown(id, title, !effort.short);
        print!("{text}");
        if let Some(dir) = &args.reports {
            let path = dir.join(format!("{id}.md"));
            std::fs::write(&path, text.replacen("## ", "# ", 1))
                .with_context(|| path.display().to_string())?;
        }
        measured.extend(statuses::records(id, &report, effort));
        match statuses::differences(id, &report, effort, &committed) {
            Ok(differences) => {
                differences.iter().for_each(|difference| eprintln!("{difference}"));
                exit = exit.max(u8::from(!differences.is_empty()));
            }
            Err(why) => {
                eprintln!("{id}: not judged: {why:#}");
                exit = 2;
            }
        }
    }
    if let Some(json) = &mut json {
        json.write_all(statuses::text(&measured)?.as_bytes()).context("--json")?;
    }
    if let Some((path, mut records)) = args.record.as_ref().zip(recorded) {
        statuses::replace(&mut records, &measured);
        let place = |experiment: &str| all().iter().position(|it| it.id == experiment);
        records.sort_by_key(|record| place(&record.experiment));
        std::fs::write(path, statuses::text(&records)?).with_context(|| path.display().to_string())?;
    }
    Ok(ExitCode::from(exit))
}

/// Reads the records in a file.
fn read(path: &Path) -> Result<Vec<StatusRecord>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    statuses::parse(&text).with_context(|| path.display().to_string())
}

fn chosen(names: &[String]) -> Result<Vec<Experiment>> {
    if names.iter().any(|name| name == "all") {
        return Ok(all());
    }
    let mut chosen = Vec::new();
    for name in names {
        let found = all().into_iter().find(|experiment| covers(experiment.id, name));
        let ids = || all().iter().map(|experiment| experiment.id).collect::<Vec<_>>().join(", ");
        let Some(found) = found else {
            bail!("experiment {name:?} does not exist: use all or one of {}", ids())
        };
        if !chosen.iter().any(|it: &Experiment| it.id == found.id) {
            chosen.push(found);
        }
    }
    Ok(chosen)
}

/// Returns whether an experiment has this result: H01-H04 has H03.
fn covers(id: &str, name: &str) -> bool {
    let number = |text: &str| text.strip_prefix(['H', 'h']).and_then(|digits| digits.parse::<u32>().ok());
    if id.eq_ignore_ascii_case(name) {
        return true;
    }
    match (id.split_once('-'), number(name)) {
        (Some((first, last)), Some(wanted)) => {
            number(first).zip(number(last)).is_some_and(|(first, last)| (first..=last).contains(&wanted))
        }
        _ => false,
    }
}
