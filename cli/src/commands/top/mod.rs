//! `top`: the cluster's activity, updated continuously.
//!
//! | module | content |
//! |---|---|
//! | [`sample`] | the requests to the cluster, and the conversion of counts to rates |
//! | [`dashboard`] | the displayed data; [`objective`] of a function's objective, [`link`] of a link, [`detail`] of one row |
//! | [`table`] | tables that can be sorted and filtered |
//! | [`view`] | the user's selection, and the keys that change it |
//! | [`draw`] | the rendering on a terminal |

mod dashboard;
mod detail;
mod draw;
#[cfg(test)]
mod fixture;
mod link;
mod objective;
mod pane;
mod sample;
mod table;
mod view;

use std::io::IsTerminal as _;
use std::pin::Pin;
use std::time::Duration;

use millrace_client::Admin;
use ratatui::crossterm::event::{Event as Input, KeyEventKind, read};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use self::dashboard::Dashboard;
use self::draw::Scene;
use self::pane::Pane;
use self::sample::{ClusterSample, EventLog, SampleHistory};
use self::table::{ColumnWidth, SortableTable};
use self::view::{KeyEffect, PaneSelection};
use crate::failure::CommandFailure;
use crate::output::print;
use crate::session::ClusterSession;

/// The shortest interval between two samples.
const INTERVAL_MIN: Duration = Duration::from_millis(200);
/// The longest window of rates. All samples within the window are kept.
const WINDOW_MAX: Duration = Duration::from_secs(600);
/// The limit of pressed keys that are not handled yet.
const KEYS_MAX: usize = 64;

const AFTER: &str = "\
On a terminal: tab or 1-4 selects a pane, s sorts by the next column, r reverses the order, / filters,
enter shows the details of the marked row, p pauses, q quits. If standard output is not a terminal, or
with --batch, the same data is printed as text.

DUE is the required request count: the number of requests that must still meet the deadline for the
function to meet its objective, or with a minus the number that may still miss it. Latencies are
accurate within a tenth. A link's RATE and CARRIED cover both directions, OF and MEASURED the busier
and the faster one; the details show each direction.

Examples:
  millrace top                          all panes, every 2 s
  millrace top --window 60s             rates and latencies over the last minute
  millrace top --batch -c 1 > now.txt   one sample, for a report";

/// Watch GPUs, functions, links and events as they change.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// The interval between two samples.
    #[arg(short, long, value_name = "TIME", default_value = "2s", value_parser = looks_every)]
    interval: Duration,
    /// The window of rates and latencies.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = looks_back)]
    window: Duration,
    /// Print text, one sample after another, without colours.
    #[arg(short, long)]
    batch: bool,
    /// End after N samples [default: never; 1 if standard output is not a terminal].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

fn looks_every(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time {
        time if time < INTERVAL_MIN => Err(format!("write an interval of at least {INTERVAL_MIN:?}")),
        _ => Ok(time),
    }
}

fn looks_back(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time {
        time if time > WINDOW_MAX => {
            Err(format!("write a window of at most {}", humantime::format_duration(WINDOW_MAX)))
        }
        _ => Ok(time),
    }
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    // Use stale reads, because a cluster without a leader is when an operator needs `top` most.
    let admin = session.admin.clone().with_stale_reads();
    let terminal = std::io::stdout().is_terminal();
    match args.batch || !terminal {
        true => {
            let looks = args.count.or((!terminal).then_some(1));
            batch(&admin, &args, looks).await
        }
        false => {
            let shown = screen(&admin, &args).await;
            ratatui::restore();
            shown
        }
    }
}

/// The samples and events so far.
#[derive(Default)]
struct Observations {
    history: SampleHistory,
    events: EventLog,
}

/// The result of one request for data: a sample, and the events since the previous one.
type SampleResult = Result<(ClusterSample, EventLog), millrace_client::Error>;

impl Observations {
    async fn look(&mut self, admin: &Admin, window: Duration) -> Result<(), millrace_client::Error> {
        let (sample, events) = look(admin, self.events.after()).await?;
        self.take(sample, events, window);
        Ok(())
    }

    fn take(&mut self, sample: ClusterSample, events: EventLog, window: Duration) {
        self.history.add(sample, window);
        self.events.extend(events);
    }
}

/// Requests a sample and the new events.
async fn look(admin: &Admin, mut events: EventLog) -> SampleResult {
    events.follow(admin).await?;
    Ok((ClusterSample::take(admin).await?, events))
}

/// Prints samples as text, the first as soon as rates are available.
async fn batch(admin: &Admin, args: &Args, looks: Option<u64>) -> Result<(), CommandFailure> {
    let mut seen = Observations::default();
    seen.look(admin, args.window).await?;
    let mut ticks = interval(args.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut printed = 0;
    while looks.is_none_or(|looks| printed < looks) {
        ticks.tick().await;
        seen.look(admin, args.window).await?;
        if let Some(picture) = Dashboard::of(&seen.history, &seen.events) {
            let before = if printed > 0 { "\n" } else { "" };
            print(&format!("{before}{}", text(&picture)))?;
        }
        printed += 1;
    }
    Ok(())
}

/// Formats a picture as text, as the screen shows it initially.
fn text(picture: &Dashboard) -> String {
    let view = PaneSelection::default();
    let head = picture.head.iter().map(|(line, _)| format!("{line}\n"));
    let panes = Pane::ALL.into_iter().map(|pane| {
        let (rows, _) = view.rows(picture, pane);
        let cells = rows.iter().map(|row| row.cells.iter().map(|cell| cell.text.as_str()).collect());
        format!("\n{}\n{}", pane.name(), aligned(picture.sheet(pane), cells.collect()))
    });
    head.chain(panes).collect()
}

/// Formats rows in columns that are as wide as their content.
fn aligned(sheet: &SortableTable, rows: Vec<Vec<&str>>) -> String {
    let headings = sheet.columns.iter().map(|column| column.heading).collect();
    let lines: Vec<Vec<&str>> = std::iter::once(headings).chain(rows).collect();
    let widest = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..sheet.columns.len()).map(widest).collect();
    let written = lines.iter().map(|line| {
        let cells =
            line.iter().zip(sheet.columns).zip(&widths).map(|((cell, column), &width)| match column.width {
                ColumnWidth::Number(_) => format!("{cell:>width$}"),
                ColumnWidth::Words(_) | ColumnWidth::Rest(_) => format!("{cell:<width$}"),
            });
        let line = cells.collect::<Vec<_>>().join("  ");
        format!("{}\n", line.trim_end())
    });
    written.collect()
}

/// Draws samples on the terminal until the user quits.
async fn screen(admin: &Admin, args: &Args) -> Result<(), CommandFailure> {
    let broken =
        |error: std::io::Error| CommandFailure::failed(format!("cannot draw on the terminal: {error}"));
    // Take the first sample before drawing, so that an unreachable cluster is reported as by every
    // verb.
    let mut seen = Observations::default();
    seen.look(admin, args.window).await?;
    let mut terminal = ratatui::try_init().map_err(broken)?;
    let mut keys = keys();
    let mut view = PaneSelection::default();
    let mut trouble = None::<String>;
    let mut ticks = interval(args.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looks = 0;
    // The pending request runs beside the keys, which work while no controller answers.
    let mut asked: Option<Pin<Box<dyn Future<Output = SampleResult>>>> = None;
    loop {
        let picture = Dashboard::of(&seen.history, &seen.events);
        let scene = Scene {
            history: &seen.history,
            events: &seen.events,
            picture: picture.as_ref(),
            view: &view,
            trouble: trouble.as_deref(),
        };
        terminal.draw(|frame| scene.draw(frame)).map_err(broken)?;
        tokio::select! {
            input = keys.recv() => match input {
                Some(Ok(Input::Key(key))) if key.kind != KeyEventKind::Release => {
                    if view.press(key, picture.as_ref()) == KeyEffect::Quit {
                        return Ok(());
                    }
                }
                // The terminal was resized: the next iteration draws in the new size.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(broken(error)),
                None => return Ok(()),
            },
            _ = ticks.tick(), if asked.is_none() => {
                if args.count.is_some_and(|count| looks == count) {
                    return Ok(());
                }
                if !view.paused {
                    looks += 1;
                    let admin = admin.clone();
                    let events = seen.events.after();
                    asked = Some(Box::pin(async move { look(&admin, events).await }));
                }
            }
            found = async { asked.as_mut().expect("a request is pending").await }, if asked.is_some() => {
                asked = None;
                match found {
                    Ok((sample, events)) => {
                        seen.take(sample, events, args.window);
                        trouble = None;
                    }
                    Err(error) => trouble = Some(error.to_string()),
                }
            }
        }
    }
}

/// Returns the pressed keys, read in a separate thread because reading a terminal blocks. The
/// thread ends with the process.
fn keys() -> mpsc::Receiver<std::io::Result<Input>> {
    let (typed, keys) = mpsc::channel(KEYS_MAX);
    std::thread::spawn(move || {
        loop {
            let input = read();
            let failed = input.is_err();
            if typed.blocking_send(input).is_err() || failed {
                return;
            }
        }
    });
    keys
}

#[cfg(test)]
mod tests {
    use super::fixture::history;
    use super::*;

    #[test]
    fn a_sample_can_be_printed_as_text() {
        let (history, events) = history();
        let text = text(&Dashboard::of(&history, &events).unwrap());
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("cluster c: controller 1 leads"), "{text}");
        let functions = lines.iter().position(|&line| line == "Functions").unwrap();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(lines[functions + 1])[..3], ["FUNCTION", "REQ/S", "FAIL/S"]);
        assert_eq!(words(lines[functions + 2])[..3], ["default/digits", "50.0", "2.0"]);
        assert!(lines.iter().all(|line| line.trim_end() == *line), "{text}");
    }

    #[test]
    fn short_intervals_and_long_windows_are_refused() {
        assert!(looks_every("1ms").is_err());
        assert_eq!(looks_every("500ms").unwrap(), Duration::from_millis(500));
        assert!(looks_every("soon").is_err());
        assert!(looks_back("11m").is_err() && looks_back("10m").is_ok());
    }
}
