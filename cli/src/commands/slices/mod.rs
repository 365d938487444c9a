//! `slices plan`: packs a list of pods on GPUs, in our way and in the paper's, without a cluster.

mod document;
mod draw;
mod file;

use std::path::PathBuf;

use clap::ValueEnum;
use millrace_slices::plan::plan;
use millrace_slices::tokens::{Config, ConfigError};
use millrace_slices::units::Grid;

use self::document::PlanDocument;
use crate::failure::CommandFailure;
use crate::output::{ListOutput, document as render, print};

const EXAMPLES: &str = "\
The file names the GPUs and the pods, with the fields of a FaSTPod:
  gpus: {count: 2, memory: 16GiB}
  orders:
    - {name: resnet, sm: 12%, quotaRequest: 0.4, quotaLimit: 0.8, memory: 1GiB, replicas: 4}
    - {name: bert, sm: 50%, quotaRequest: 0.6, memory: 2GiB}
The field sm is a percentage of the SMs; a quota is a fraction of the time. A limit is 1 and replicas are
1 unless named. The optional bandwidth is the share of the memory's bandwidth that the pod uses at full
speed. A file has at most 1 MiB and 1000 replicas, for at most 256 GPUs.

Pods are placed in the order of the file. Nothing is deployed: functions ask for slices in their manifests
(resources.sm, quotaRequest, quotaLimit and slices).

Examples:
  millrace slices plan -f examples/slices/pods.yaml
  millrace slices plan -f examples/slices/pods.yaml --grid percentages
  millrace slices plan -f - -o json < pods.yaml";

/// Plan slices of GPUs, without a cluster.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    Plan(Plan),
}

/// Pack a list of pods on GPUs by dry runs of the token rule, and by the paper's rectangles.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct Plan {
    /// The file of GPUs and pods; '-' reads standard input.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// The division of the SMs in dry runs: 16 units in aligned blocks, or percentages as in the
    /// paper. The paper's rectangles are always percentages.
    #[arg(long, value_enum, value_name = "GRID", default_value_t)]
    grid: GridName,
    #[command(flatten)]
    output: ListOutput,
}

/// The division of the SMs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum GridName {
    /// Aligned blocks of 1, 2, 4, 8 or 16 of 16 units; shares are rounded up.
    #[default]
    Blocks,
    /// Percentages of the SMs.
    Percentages,
}

impl GridName {
    /// Returns our rule with this division.
    fn config(self) -> Result<Config, ConfigError> {
        let grid = match self {
            Self::Blocks => Grid::Blocks16,
            Self::Percentages => Grid::Caps100,
        };
        let ours = Config::SLICES;
        Config::new(grid, ours.token(), ours.order(), ours.cap())
    }
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    let Verb::Plan(args) = &args.verb;
    let about = |problem: String| CommandFailure::usage(problem).about(args.file.display());
    let file = file::read(&args.file)?;
    let config = args.grid.config().map_err(|error| CommandFailure::failed(error.to_string()))?;
    let plan = plan(&file.orders, file.gpus, config).map_err(|error| about(error.to_string()))?;
    let document = PlanDocument::new(&file, &plan, config.grid());
    match render(args.output.output, &document)? {
        Some(text) => print(&text),
        None => print(&draw::text(&file, &plan, config.grid())),
    }
}
