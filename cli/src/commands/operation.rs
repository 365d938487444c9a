//! `operation`: waits for a long-running operation, or cancels it.

use std::time::Duration;

use millrace_client::messages as wire;

use crate::clock;
use crate::failure::CommandFailure;
use crate::output::{operations as shown, print};
use crate::progress;
use crate::session::ClusterSession;

/// The interval at which the progress line is updated.
const STEP: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Examples:
  millrace get operations                  running operations, and those of the last day
  millrace drain worker-1 --no-wait && millrace operation wait 17 --timeout 10m
  millrace operation cancel 17             cancel a drain (the node stays cordoned) or a profile";

/// Wait for an operation, or cancel it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Wait until an operation has ended.
    Wait(Wait),
    /// Cancel a drain or a profile.
    Cancel(Cancel),
}

/// Wait until an operation has ended.
#[derive(Debug, clap::Args)]
struct Wait {
    /// The operation's number.
    #[arg(value_name = "ID")]
    id: String,
    /// The longest time to wait.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "5m")]
    timeout: Duration,
}

/// Cancel a drain or a profile.
#[derive(Debug, clap::Args)]
struct Cancel {
    /// The operation's number.
    #[arg(value_name = "ID")]
    id: String,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    match args.verb {
        Verb::Wait(Wait { id, timeout }) => wait(&id, timeout, session).await,
        Verb::Cancel(Cancel { id }) => {
            let operation = session.admin.cancel_operation(&id).await?;
            print(&format!("operation/{id} {} of {}: {}", operation.kind, operation.object, told(&operation)))
        }
    }
}

/// Waits until an operation has ended. Returns a failure if the operation failed.
async fn wait(id: &str, timeout: Duration, session: &ClusterSession) -> Result<(), CommandFailure> {
    let line = progress::waiting("waiting");
    let ended = session.admin.wait_operation(id, STEP, |operation| line.set_message(told(operation)));
    let ended = tokio::time::timeout_at(clock::now() + timeout, ended).await;
    line.finish_and_clear();
    let Ok(ended) = ended else {
        let timeout = humantime::format_duration(timeout);
        return Err(CommandFailure::timed_out(format!("operation {id} still runs after {timeout}"))
            .hint("see its progress: millrace get operations"));
    };
    let operation = ended?;
    let said = format!("operation/{id} {} of {}: {}", operation.kind, operation.object, told(&operation));
    match operation.state() {
        wire::OperationState::Succeeded => print(&said),
        _ => Err(CommandFailure::failed(said)),
    }
}

/// Describes an operation's state and progress.
fn told(operation: &wire::Operation) -> String {
    let parts = [
        shown::word(operation.state()).to_lowercase(),
        shown::progress(operation),
        operation.message.clone(),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}
