//! `events`: what happened in the cluster, and what happens next.

use std::time::Duration;

use millrace_client::messages as wire;

use crate::failure::Failure;
use crate::output::events::{Event, line};
use crate::output::lines::Lines;
use crate::output::print;
use crate::session::Session;

/// How long one request waits for news. Shorter than what a server would wait.
const WAIT: Duration = Duration::from_secs(20);

const AFTER: &str = "\
A controller keeps its last 4,096 events, from when it began. With --follow the command goes on at another
controller when the one it asks goes away.

Examples:
  millrace events                    what there is
  millrace events --warnings -f      what an operator should look at, as it happens
  millrace events -f -o json         a line of JSON for each";

/// Show what happened in the cluster: nodes, GPUs, functions and leaders that came, went and failed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Go on with what happens from now on, until interrupted.
    #[arg(short, long)]
    follow: bool,
    /// Only warnings.
    #[arg(long)]
    warnings: bool,
    #[command(flatten)]
    lines: Lines,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let (mut after, mut shown) = (String::new(), 0);
    let mut wait = Duration::ZERO;
    loop {
        let page = session.admin.events(&after, wait).await?;
        if page.missed > 0 {
            eprintln!("{} events are not kept any more", page.missed);
        }
        let wanted = page.events.iter().filter(|it| args.wants(it));
        let lines =
            wanted.map(|it| args.lines.line(|| line(it), &Event::from(it))).collect::<Result<Vec<_>, _>>()?;
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
        let what = if args.warnings { "no warnings" } else { "no events" };
        eprintln!("{what} since the controller that answered began");
    }
    Ok(())
}

impl Args {
    fn wants(&self, event: &wire::Event) -> bool {
        !self.warnings || event.severity() == wire::EventSeverity::Warning
    }
}
