//! `logs`: the last lines that controllers and workers logged, and what they log next.

use std::collections::VecDeque;
use std::time::Duration;

use clap::ValueEnum;
use millrace_client::log::{Filter, Level, Line, PAGE_LINES};
use millrace_types::FunctionName;

use crate::clock;
use crate::failure::Failure;
use crate::output::lines::Lines;
use crate::output::logs::{Entry, line};
use crate::output::print;
use crate::session::Session;

/// How long one request waits for news. Shorter than what a server would wait.
const WAIT: Duration = Duration::from_secs(20);

const AFTER: &str = "\
Each process keeps the last 4,096 lines that its --log let through, in memory. A line that comes while the
others are read may be left out, and is counted: logging waits for nobody. With --follow the command goes
on at another controller when the one it asks goes away.

Examples:
  millrace logs                            what everybody logged, by time
  millrace logs -f worker-1 controller-2   as it comes
  millrace logs --level warn --since 10m
  millrace logs --request ID -o json       a line of JSON for each; where requests are traced";

/// Show what controllers and workers logged.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// Nodes, and controllers as controller-1 [default: everybody].
    #[arg(value_name = "NODE|CONTROLLER")]
    of: Vec<String>,
    /// Go on with what is logged from now on, until interrupted.
    #[arg(short, long)]
    follow: bool,
    /// Lines that are at least so grave.
    #[arg(long, value_enum, value_name = "LEVEL")]
    level: Option<AtLeast>,
    /// Lines about a function of the tenant.
    #[arg(long, value_name = "NAME")]
    function: Option<FunctionName>,
    /// Lines about a request: of processes that record spans (--keep-spans, --otlp-endpoint).
    #[arg(long, value_name = "ID")]
    request: Option<String>,
    /// Lines of the last so long, such as 10m.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    since: Option<Duration>,
    /// The last so many lines; with --follow, before those that come.
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
    #[command(flatten)]
    lines: Lines,
}

/// A level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AtLeast {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

impl From<AtLeast> for Level {
    fn from(level: AtLeast) -> Self {
        match level {
            AtLeast::Trace => Self::Trace,
            AtLeast::Debug => Self::Debug,
            AtLeast::Info => Self::Info,
            AtLeast::Warn => Self::Warn,
            AtLeast::Error => Self::Error,
        }
    }
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let filter = args.filter(session);
    let (mut after, mut wait, mut shown) = (String::new(), Duration::ZERO, 0);
    // What there is comes first; of that the last lines may be wanted alone.
    let mut tail = args.tail.map(|max| Tail { lines: VecDeque::new(), max });
    let mut warned = Vec::new();
    loop {
        let page = session.admin.logs(&args.of, &filter, &after, wait).await?;
        if page.left_out > 0 {
            eprintln!("{} lines were left out", page.left_out);
        }
        for why in page.missing.iter().filter(|why| !warned.contains(*why)) {
            eprintln!("not asked: {why}");
        }
        warned = page.missing;
        after = page.next;
        // Not only when there is nothing: asking is logged too, by some --log.
        let at_end = !page.more && page.lines.len() < PAGE_LINES as usize;
        let lines = shown_now(&mut tail, page.lines, at_end);
        shown += lines.len();
        if !lines.is_empty() {
            let lines = lines
                .iter()
                .map(|it| args.lines.line(|| line(it), &Entry::from(it)))
                .collect::<Result<Vec<_>, _>>()?;
            print(&lines.concat())?;
        }
        if at_end && !args.follow {
            break;
        }
        wait = if at_end { WAIT } else { Duration::ZERO };
    }
    if shown == 0 {
        eprintln!("no such line is kept");
    }
    Ok(())
}

/// What is shown of a page: where the last lines alone are wanted, nothing until the end is known.
fn shown_now(tail: &mut Option<Tail>, lines: Vec<Line>, at_end: bool) -> Vec<Line> {
    let Some(last) = tail else { return lines };
    last.add(lines);
    if at_end { tail.take().map(Tail::lines).unwrap_or_default() } else { Vec::new() }
}

/// The last lines of those that there are.
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
    fn filter(&self, session: &Session) -> Filter {
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
    fn the_last_lines_are_shown_once_the_end_is_known_and_what_follows_at_once() {
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
