//! `millrace-experiments`: runs the papers' experiments and prints the papers' figures beside ours.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use millrace_experiments::{Effort, Experiment, all};

/// Runs the papers' experiments on the twin, and exits with an error unless each order of the
/// baselines is the paper's and each figure is in its band or has a written cause.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Which: H03, H07, …, or all.
    #[arg(required = true)]
    experiments: Vec<String>,
    /// How many seeds, from 1 on.
    #[arg(long, default_value_t = Effort::FULL.seeds, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// A part of each workload, to see that it runs. Figures are not judged.
    #[arg(long)]
    short: bool,
    /// Also write what is printed to this file, with what it is.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What `docs/experiments.md` begins with; when its sections were recorded, and what there is to say of all
/// of them, is added there by hand.
const HEAD: &str = "\
# Experiments

The papers' experiments on Millrace's twin (`sim/`): the workers' real actors and policies in virtual
time, over modelled GPUs and links that run at the papers' figures. What the papers do not say is
assumed, and each experiment says what. These are simulations: they show what the policies do with the
figures, not how fast any machine is.

Each figure of a paper has a band that was declared for it; where ours is outside, the cause is given.
An order of baselines agrees unless, with the seeds paired, the opposite holds at 95%. The command
fails where something differs and nobody knows why. Where the paper leaves two readings open, a figure
names the one it is for, and the tables have both.

F2.2, F3.2 and H18 to H26 are of another kind: flows of data between the functions of workflows
(`sim/src/passing`), without actors or chunks. The cores that decide are
`policy::paths`, `policy::elastic` and `policy::rates`, the same that servers use, for the
baselines with other choices; sizes and times are assumed, and calibrated on INFless+'s share of data passing alone.

In all of them, beyond what each says: actors' messages and decisions take no time, and requests reach their
node at once. Models are in host memory from the start, so that nothing is a cold start. Each executor is heard
of at a microsecond of its own in every 256 (`worker/src/clock.rs`), so that a run of 9 ms takes 9.216. A link is
shared evenly by the copies under way on it, chunk by chunk. How much of a run is left when the last weights
arrive is fitted to Torpor's table 4 (`sim/src/models.rs`). Faults are executors that die; no node is lost. What
differs from the production router is at the head of `sim/src/router.rs`.

`unified` is compared with every other policy that an experiment runs, in every quantity that it measures: ahead
or behind is what the paired seeds say at 95%, and what is within a thousandth is level. Latencies are of
answers, and compared only with policies that answer as many requests.
";

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let effort = Effort { seeds: args.seeds, short: args.short };
    let mut output = args.output.as_ref().map(std::fs::File::create).transpose().context("--output")?;
    if let Some(output) = &mut output {
        write!(output, "{HEAD}\nWith {} seeds.\n\n", effort.seeds).context("--output")?;
    }
    let mut holds = true;
    for Experiment { id, title, run } in chosen(&args.experiments)? {
        let report = run(effort).with_context(|| id.to_owned())?;
        let text = report.markdown(id, title, !effort.short);
        print!("{text}");
        if let Some(output) = &mut output {
            output.write_all(text.as_bytes()).context("--output")?;
        }
        if !effort.short && !report.holds() {
            eprintln!("{id}: something differs from the paper and nobody knows why");
            holds = false;
        }
    }
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
            bail!("experiment {name:?} is not known: use all or one of {}", ids())
        };
        if !chosen.iter().any(|it: &Experiment| it.id == found.id) {
            chosen.push(found);
        }
    }
    Ok(chosen)
}

/// Whether an experiment has this result: H01-H04 has H03.
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
