//! `millrace-experiments`: runs the papers' experiments and prints the papers' figures beside ours.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use millrace_experiments::{Effort, Experiment, all};

/// Runs the papers' experiments on the simulator. Exits with an error unless each order of the baselines is
/// the paper's, and each figure is in its band or has a stated cause.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Experiments to run: H03, H07, …, or all.
    #[arg(required = true)]
    experiments: Vec<String>,
    /// Number of seeds, from 1 on.
    #[arg(long, default_value_t = Effort::FULL.seeds, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Run only a part of each workload, to check that it runs. Figures are not judged.
    #[arg(long)]
    short: bool,
    /// Also write the report to this file, after an introduction.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The introduction of `docs/experiments.md`. The dates of the records, and the notes on all sections, are
/// added to the page by hand.
const HEAD: &str = "\
# Experiments

The papers' experiments on Millrace's simulator (`sim/`): the workers' real actors and policies in virtual
time, over modelled GPUs and links that run at the papers' figures. If a paper leaves something open, the
experiment states its assumption. These are simulations: they show the effect of the policies at these
figures, not the speed of any machine.

Each figure of a paper has a declared band. If our figure is outside the band, the cause is given. An order
of baselines agrees unless, with the seeds paired, the opposite holds at 95%. The command fails if a figure
or an order differs without a known cause. If a paper allows two readings, a figure names its reading, and
the tables have both.

F2.2, F3.2 and H18 to H26 are a separate simulation: flows of data between the functions of workflows
(`sim/src/passing`), without actors or chunks. The deciding cores are those of production, `transfers::paths`,
`memory::elastic` and `transfers::rates`, with other options for the baselines. Sizes and times are assumed, and
calibrated only on the share of data passing in INFless+.

PACK, TOKENS, CHURN and CAP run the core of GPU sharing (`policy/slices`) alone, without a simulated cluster.
No worker runs slices yet.

All other experiments share these assumptions. Actors' messages and decisions take no time, and requests reach their
node at once. Models are in host memory from the start, so there are no cold starts. Each executor reports
only at its own microsecond of every 256 (`worker/src/clock.rs`), so a run of 9 ms takes 9.216 ms. Copies that
cross a link at the same time share the link evenly, chunk by chunk. The part of a run that remains when the
last weights arrive is fitted to Torpor's table 4 (`sim/src/models.rs`). Faults are executors that die; no node
is lost. The head of `sim/src/router.rs` lists the differences from the production router.

`unified` is compared with every other policy of an experiment, in every measured quantity. `unified` is ahead
or behind if the paired seeds show so at 95%; differences within a thousandth are level. Latencies are those of
answers, and are compared only with policies that answer as many requests.
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
            eprintln!("{id}: a figure or an order differs from the paper without a known cause");
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
