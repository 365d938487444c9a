//! `cluster`: the controllers' group, seen and changed.

mod members;
mod status;
mod wait;

use std::num::NonZeroU64;

use crate::failure::Failure;
use crate::session::Session;

const EXAMPLES: &str = "\
Examples:
  millrace cluster status -o wide
  millrace cluster wait --voters 3 --nodes 2 --timeout 30s
  millrace cluster transfer                hand leadership to another voter, before its machine goes
  millrace cluster remove 2                for good: controller 2 does not come back under this id
  millrace controller --id 4 --data-dir ./new --join 127.0.0.1:7070    takes its place";

/// See and change the group of controllers.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    Status(status::Args),
    Wait(wait::Args),
    /// Make a learner a voter.
    Promote(Change),
    /// Remove a controller from the group, for good.
    Remove(Change),
    /// Hand leadership over.
    Transfer(Successor),
}

/// Which controller.
#[derive(Debug, clap::Args)]
struct Change {
    /// Its number in the group.
    #[arg(value_name = "ID")]
    id: NonZeroU64,
    /// Only begin: 'millrace operation wait' waits for the end.
    #[arg(long)]
    no_wait: bool,
}

/// Who is to lead.
#[derive(Debug, clap::Args)]
struct Successor {
    /// A voter's number [default: the one that has most of the log].
    #[arg(value_name = "ID")]
    id: Option<NonZeroU64>,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    match args.verb {
        Verb::Status(args) => status::run(args, session).await,
        Verb::Wait(args) => wait::run(args, session).await,
        Verb::Promote(Change { id, no_wait: false }) => members::promote(id, session).await,
        Verb::Promote(Change { id, no_wait: true }) => members::begin_promotion(id, session).await,
        Verb::Remove(Change { id, no_wait: false }) => members::remove(id, session).await,
        Verb::Remove(Change { id, no_wait: true }) => members::begin_removal(id, session).await,
        Verb::Transfer(Successor { id }) => members::transfer(id, session).await,
    }
}
