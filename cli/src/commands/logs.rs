//! `logs`: the past and future log lines of controllers and workers.

use std::collections::VecDeque;
use std::time::Duration;

use clap::ValueEnum;
use millrace_client::log::{Filter, Level, Line, PAGE_LINES};
use millrace_types::FunctionName;

use crate::clock;
use crate::failure::CommandFailure;
use crate::output::lines::LineOutput;
use crate::output::logs::{LogLineDocument, line};
use crate::output::print;
use crate::session::ClusterSession;

/// The longest wait of a request for new lines, below a server's limit.
const WAIT: Duration = Duration::from_secs(20);

const AFTER: &str = "\
Each process keeps the last 4,096 lines that passed its --log filter, in memory. A line that arrives
while lines are read may be left out, and is counted, because logging never waits. With --follow, the
command moves to another controller when its controller goes away.

Examples:
  millrace logs                            the lines of all processes, by time
  millrace logs -f worker-1 controller-2   the kept lines of two processes, then new ones
  millrace logs --level warn --since 10m
  millrace logs --request ID -o json       one line of JSON per log line; requests must be traced";

/// Show the log lines of controllers and workers.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Nodes, and controllers as controller-1 [default: all processes].
    #[arg(value_name = "NODE|CONTROLLER")]
    of: Vec<String>,
    /// Continue with new lines until interrupted.
    #[arg(short, long)]
    follow: bool,
    /// The lowest level to show.
    #[arg(long, value_enum, value_name = "LEVEL")]
    level: Option<LevelArg>,
    /// Show only lines about a function of the tenant.
    #[arg(long, value_name = "NAME")]
    function: Option<FunctionName>,
    /// Show only lines about a request, from processes that record spans (--keep-spans,
    /// --otlp-endpoint).
    #[arg(long, value_name = "ID")]
    request: Option<String>,
    /// Show only lines that are younger than this, such as 10m.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    since: Option<Duration>,
    /// Show only the last N lines; with --follow, before the new lines.
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
    #[command(flatten)]
    lines: LineOutput,
}

/// The lowest level to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LevelArg {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Trace => Self::Trace,
            LevelArg::Debug => Self::Debug,
            LevelArg::Info => Self::Info,
            LevelArg::Warn => Self::Warn,
            LevelArg::Error => Self::Error,
        }
    }
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let filter = args.filter(session);
    let mut after = String::new();
    let mut wait = Duration::ZERO;
    let mut shown = 0;
    // The kept lines are read first. `--tail` limits these lines only.
    let mut tail = args.tail.map(|max| Tail { lines: VecDeque::new(), max });
    let mut warned = Vec::new();
    loop {
        let page = session.admin.logs(&args.of, &filter, &after, wait).await?;
        if page.left_out > 0 {
            eprintln!("{} lines are left out", page.left_out);
        }
        for why in page.missing.iter().filter(|why| !warned.contains(*why)) {
            eprintln!("a process did not answer: {why}");
        }
        warned = page.missing;
        after = page.next;
        // A short page is the end too, not only an empty one: with some filters, each request for
        // lines causes a log line.
        let at_end = !page.more && page.lines.len() < PAGE_LINES as usize;
        let lines = shown_now(&mut tail, page.lines, at_end);
        shown += lines.len();
        if !lines.is_empty() {
            let lines = lines
                .iter()
                .map(|it| args.lines.line(|| line(it), &LogLineDocument::from(it)))
                .collect::<Result<Vec<_>, _>>()?;
            print(&lines.concat())?;
        }
        if at_end && !args.follow {
            break;
        }
        wait = if at_end { WAIT } else { Duration::ZERO };
    }
    if shown == 0 {
        eprintln!("no matching line is kept");
    }
    Ok(())
}

/// Returns the lines of a page to print. With `--tail`, nothing is printed until the end of the
/// kept lines is known.
fn shown_now(tail: &mut Option<Tail>, lines: Vec<Line>, at_end: bool) -> Vec<Line> {
    let Some(last) = tail else { return lines };
    last.add(lines);
    if at_end { tail.take().map(Tail::lines).unwrap_or_default() } else { Vec::new() }
}

/// The last of the lines read so far.
struct Tail {
    lines: VecDeque<Line>,
    max: usize,
}

impl Tail {
    fn add(&mut self, lines: Vec<Line>) {
        self.lines.extend(lines);
        self.lines.drain(..self.lines.len().saturating_sub(self.max));
    }

    fn lines(self) -> Vec<Line> {
        self.lines.into()
    }
}

impl Args {
    fn filter(&self, session: &ClusterSession) -> Filter {
        let function = self.function.as_ref();
        let since = self.since.and_then(|since| clock::wall().checked_sub(since));
        Filter {
            at_least: self.level.map_or(Level::Unspecified, Level::from).into(),
            function: function.map(|name| session.key(name).to_string()).unwrap_or_default(),
            request_id: self.request.clone().unwrap_or_default(),
            since: since.map(prost_types::Timestamp::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_prints_the_last_lines_at_the_end_and_new_lines_at_once() {
        let lines = |seqs: std::ops::Range<u64>| seqs.map(|seq| Line { seq, ..Line::default() }).collect();
        let mut tail = Some(Tail { lines: VecDeque::new(), max: 3 });
        let mut shown = |seqs, at_end| {
            let shown = shown_now(&mut tail, lines(seqs), at_end);
            shown.into_iter().map(|line| line.seq).collect::<Vec<_>>()
        };
        assert_eq!(shown(1..9, false), [0; 0]);
        assert_eq!(shown(9..11, true), [8, 9, 10]);
        assert_eq!(shown(11..12, true), [11]);
    }
}
