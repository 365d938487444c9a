//! `cluster`: the status of the controller group, and its changes.

mod members;
mod status;
mod wait;

use std::num::NonZeroU64;

use crate::failure::CommandFailure;
use crate::session::ClusterSession;

const EXAMPLES: &str = "\
Examples:
  millrace cluster status -o wide
  millrace cluster wait --voters 3 --nodes 2 --timeout 30s
  millrace cluster transfer                hand leadership to another voter, before maintenance
  millrace cluster remove 2                remove controller 2 for good: its id is never reused
  millrace controller --id 4 --data-dir ./new --join 127.0.0.1:7070    add a controller in its place";

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
    /// Remove a controller from the group for good.
    Remove(Change),
    /// Transfer leadership to another voter.
    Transfer(Successor),
}

/// The controller of a change.
#[derive(Debug, clap::Args)]
struct Change {
    /// The controller's id in the group.
    #[arg(value_name = "ID")]
    id: NonZeroU64,
    /// Start the change without waiting for its end; 'millrace operation wait' waits.
    #[arg(long)]
    no_wait: bool,
}

/// The controller that receives leadership.
#[derive(Debug, clap::Args)]
struct Successor {
    /// The id of a voter [default: the voter with the most of the log].
    #[arg(value_name = "ID")]
    id: Option<NonZeroU64>,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
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
