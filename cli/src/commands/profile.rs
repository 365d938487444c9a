//! `profile`: measures the speed of a function's model on parts of a GPU.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_types::FunctionName;

use crate::clock;
use crate::failure::CommandFailure;
use crate::output::{ListFormat, operations, print, profiles};
use crate::progress;
use crate::session::ClusterSession;

/// The interval at which the progress line is updated.
const STEP: Duration = Duration::from_millis(500);

const HELP: &str = "\
A worker with the function sends requests of its own to a shared GPU, one after another, on 1, 2, 4, 8 or all 16
SM units. Only requests that were alone on the GPU count, and after a request that was not the trial pauses, so
that other requests lose little. Nothing is billed. The profile helps to choose 'resources.sm' and the quotas in
a function's manifest. GPUs are shared after 'millrace policy set --gpu-sharing slices'.

Examples:
  millrace profile classify                measure as many widths as the curve needs, at most five
  millrace profile classify --grid         measure every width with 20, 40, 60, 80 and 100% of the time
  millrace get profiles                    the profiles of all functions of the tenant";

/// Measure the speed of a function on parts of a GPU.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// The function.
    #[arg(value_name = "FUNCTION")]
    function: FunctionName,
    /// Measure every width with every quota: 25 trials, as in the FaST-GShare paper.
    #[arg(long)]
    grid: bool,
    /// The longest time to wait for the end.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10m")]
    timeout: Duration,
    /// Start the profile without waiting for its end.
    #[arg(long)]
    no_wait: bool,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let key = session.key(&args.function);
    let operation = session.admin.profile_function(&key, args.grid).await?;
    let id = operation.id;
    if args.no_wait {
        return print(&format!("function/{} is being profiled: operation/{id}", args.function));
    }
    let line = progress::waiting("profiling");
    let ended = session.admin.wait_operation(&id, STEP, |operation| {
        line.set_message(format!("{}, {}", operations::progress(operation), operation.message));
    });
    let ended = tokio::time::timeout_at(clock::now() + args.timeout, ended).await;
    line.finish_and_clear();
    let Ok(ended) = ended else {
        let timeout = humantime::format_duration(args.timeout);
        let last = session.admin.operation(&id).await.map(|it| it.message).unwrap_or_default();
        return Err(CommandFailure::timed_out(format!("operation {id} still runs after {timeout}: {last}"))
            .hint(format!(
                "it goes on: 'millrace operation wait {id}', or 'millrace operation cancel {id}'"
            )));
    };
    let operation = ended?;
    if operation.state() != wire::OperationState::Succeeded {
        let message = format!("function/{} was not profiled: {}", args.function, operation.message);
        return Err(CommandFailure::failed(message));
    }
    let mut measured = session.admin.profiles(Some(&key.tenant), Some(&key.name)).await?;
    measured.retain(|profile| profile.operation == id);
    print(&profiles::table(&measured).render(ListFormat::Table))
}
