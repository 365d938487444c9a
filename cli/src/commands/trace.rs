//! `trace`: the spans of a request.

use crate::failure::CommandFailure;
use crate::output::traces::TraceDocument;
use crate::output::{ListOutput, document, print};
use crate::session::ClusterSession;

const AFTER: &str = "\
Every response names its request (x-request-id; 'millrace invoke' prints it). Controllers and workers
that were started with --keep-spans N keep their last N spans until they end.

Examples:
  millrace up --keep-spans 20000
  millrace trace 01K9ZV2M4T6W8Y0A2C4E6G8J0M
  millrace trace 4bf92f3577b34da6a3ce929d0e0e4736 -o json";

/// Show the spans of one request on every controller and worker, and its latency breakdown.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// The id of the request or of its trace.
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let trace = TraceDocument::new(session.admin.trace(&args.id).await?);
    if let Some(text) = document(args.output.output, &trace)? {
        return print(&text);
    }
    print(&trace.tree(args.output.output))
}
