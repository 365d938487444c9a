//! `events`: the past and future events of the cluster.

use std::time::Duration;

use millrace_client::messages as wire;

use crate::failure::CommandFailure;
use crate::output::events::{EventDocument, line};
use crate::output::lines::LineOutput;
use crate::output::print;
use crate::session::ClusterSession;

/// The longest wait of a request for new events, below a server's limit.
const WAIT: Duration = Duration::from_secs(20);

const AFTER: &str = "\
A controller keeps its last 4,096 events since its start. With --follow, the command moves to another
controller when its controller goes away.

Examples:
  millrace events                    all events that are kept
  millrace events --warnings -f      the kept events that may need an operator, then new ones
  millrace events -f -o json         one line of JSON per event";

/// Show events of the cluster: nodes, GPUs, functions and leaders that came, went or failed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Continue with new events until interrupted.
    #[arg(short, long)]
    follow: bool,
    /// Show only warnings.
    #[arg(long)]
    warnings: bool,
    #[command(flatten)]
    lines: LineOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let mut after = String::new();
    let mut shown = 0;
    let mut wait = Duration::ZERO;
    loop {
        let page = session.admin.events(&after, wait).await?;
        if page.missed > 0 {
            eprintln!("{} events are no longer kept", page.missed);
        }
        let wanted = page.events.iter().filter(|it| args.wants(it));
        let lines = wanted
            .map(|it| args.lines.line(|| line(it), &EventDocument::from(it)))
            .collect::<Result<Vec<_>, _>>()?;
        shown += lines.len();
        if !lines.is_empty() {
            print(&lines.concat())?;
        }
        after = page.next;
        if page.events.is_empty() && !args.follow {
            break;
        }
        wait = if args.follow { WAIT } else { Duration::ZERO };
    }
    if shown == 0 {
        let kind = if args.warnings { "no warnings" } else { "no events" };
        eprintln!("{kind} since the start of the answering controller");
    }
    Ok(())
}

impl Args {
    fn wants(&self, event: &wire::Event) -> bool {
        !self.warnings || event.severity() == wire::EventSeverity::Warning
    }
}
