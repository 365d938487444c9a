//! `top`: what the cluster does, as it does it.
//!
//! | module | holds |
//! |---|---|
//! | [`sample`] | what is asked, and how counts become rates |
//! | [`picture`] | what is shown of it; [`objective`] of a function's objective, [`link`] of a link, [`detail`] of one row |
//! | [`sheet`] | tables that can be sorted and filtered |
//! | [`view`] | what whoever looks has chosen, and what keys do |
//! | [`draw`] | the picture on a terminal |

mod detail;
mod draw;
#[cfg(test)]
mod fixture;
mod link;
mod objective;
mod pane;
mod picture;
mod sample;
mod sheet;
mod view;

use std::io::IsTerminal as _;
use std::pin::Pin;
use std::time::Duration;

use millrace_client::Admin;
use ratatui::crossterm::event::{Event as Input, KeyEventKind, read};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use self::draw::Scene;
use self::pane::Pane;
use self::picture::Picture;
use self::sample::{Events, History, Sample};
use self::sheet::{Sheet, Width};
use self::view::{Then, View};
use crate::failure::Failure;
use crate::output::print;
use crate::session::Session;

/// The shortest time between two looks.
const INTERVAL_MIN: Duration = Duration::from_millis(200);
/// How far back rates look at most: all looks until then are kept.
const WINDOW_MAX: Duration = Duration::from_secs(600);
/// Keys that were pressed and not yet looked at.
const KEYS_MAX: usize = 64;

const AFTER: &str = "\
On a terminal: tab or 1-4 goes to another pane, s sorts by the next column, r the other way round,
/ filters, enter looks closer at what is marked, p pauses, q ends. Where standard output is no terminal,
or with --batch, it prints the same as text.

DUE is the required request count: how many requests have still to be in time for the objective to be
met, or with a minus how many may be late. Latencies are within a tenth. A link's RATE and CARRIED are of
both directions, OF and MEASURED of the busier and the faster one; a closer look has each.

Examples:
  millrace top                          all of it, every 2 s
  millrace top --window 60s             rates and latencies of the last minute
  millrace top --batch -c 1 > now.txt   one look, for a report";

/// Watch GPUs, functions, links and events as they change.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    /// How often to look.
    #[arg(short, long, value_name = "TIME", default_value = "2s", value_parser = looks_every)]
    interval: Duration,
    /// How far back rates and latencies look.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = looks_back)]
    window: Duration,
    /// Print text, a look after the other, and no colours.
    #[arg(short, long)]
    batch: bool,
    /// End after so many looks [default: never; 1 where standard output is no terminal].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

fn looks_every(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time {
        time if time < INTERVAL_MIN => Err(format!("look at most every {INTERVAL_MIN:?}")),
        _ => Ok(time),
    }
}

fn looks_back(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time {
        time if time > WINDOW_MAX => {
            Err(format!("look back at most {}", humantime::format_duration(WINDOW_MAX)))
        }
        _ => Ok(time),
    }
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    // A cluster without a leader is looked at too, and then above all.
    let admin = session.admin.clone().stale();
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

/// What was seen so far.
#[derive(Default)]
struct Seen {
    history: History,
    events: Events,
}

/// What a look found: a sample, and the events since.
type Look = Result<(Sample, Events), millrace_client::Error>;

impl Seen {
    async fn look(&mut self, admin: &Admin, window: Duration) -> Result<(), millrace_client::Error> {
        let found = look(admin, self.events.after()).await?;
        self.take(found, window);
        Ok(())
    }

    fn take(&mut self, (sample, events): (Sample, Events), window: Duration) {
        self.history.add(sample, window);
        self.events.extend(events);
    }
}

/// Asks the cluster.
async fn look(admin: &Admin, mut events: Events) -> Look {
    events.follow(admin).await?;
    Ok((Sample::take(admin).await?, events))
}

/// Prints looks as text, the first as soon as there are rates.
async fn batch(admin: &Admin, args: &Args, looks: Option<u64>) -> Result<(), Failure> {
    let mut seen = Seen::default();
    seen.look(admin, args.window).await?;
    let mut ticks = interval(args.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut printed = 0;
    while looks.is_none_or(|looks| printed < looks) {
        ticks.tick().await;
        seen.look(admin, args.window).await?;
        if let Some(picture) = Picture::of(&seen.history, &seen.events) {
            let before = if printed > 0 { "\n" } else { "" };
            print(&format!("{before}{}", text(&picture)))?;
        }
        printed += 1;
    }
    Ok(())
}

/// All of a picture, as the screen has it at first.
fn text(picture: &Picture) -> String {
    let view = View::default();
    let head = picture.head.iter().map(|(line, _)| format!("{line}\n"));
    let panes = Pane::ALL.into_iter().map(|pane| {
        let (rows, _) = view.rows(picture, pane);
        let cells = rows.iter().map(|row| row.cells.iter().map(|cell| cell.text.as_str()).collect());
        format!("\n{}\n{}", pane.name(), aligned(picture.sheet(pane), cells.collect()))
    });
    head.chain(panes).collect()
}

/// Lines of columns that are as wide as what is in them.
fn aligned(sheet: &Sheet, rows: Vec<Vec<&str>>) -> String {
    let headings = sheet.columns.iter().map(|column| column.heading).collect();
    let lines: Vec<Vec<&str>> = std::iter::once(headings).chain(rows).collect();
    let widest = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..sheet.columns.len()).map(widest).collect();
    let written = lines.iter().map(|line| {
        let cells =
            line.iter().zip(sheet.columns).zip(&widths).map(|((cell, column), &width)| match column.width {
                Width::Number(_) => format!("{cell:>width$}"),
                Width::Words(_) | Width::Rest(_) => format!("{cell:<width$}"),
            });
        let line = cells.collect::<Vec<_>>().join("  ");
        format!("{}\n", line.trim_end())
    });
    written.collect()
}

/// Draws looks on the terminal until it is left.
async fn screen(admin: &Admin, args: &Args) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::failed(format!("cannot draw on the terminal: {error}"));
    // Before it is drawn on: what cannot be reached at first is said as by every verb.
    let mut seen = Seen::default();
    seen.look(admin, args.window).await?;
    let mut terminal = ratatui::try_init().map_err(broken)?;
    let mut keys = keys();
    let (mut view, mut trouble) = (View::default(), None::<String>);
    let mut ticks = interval(args.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looks = 0;
    // Beside the keys, which are heard while nobody answers too.
    let mut asked: Option<Pin<Box<dyn Future<Output = Look>>>> = None;
    loop {
        let picture = Picture::of(&seen.history, &seen.events);
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
                    if view.press(key, picture.as_ref()) == Then::Quit {
                        return Ok(());
                    }
                }
                // It is drawn anew, in the size that it has now.
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
                    let (admin, events) = (admin.clone(), seen.events.after());
                    asked = Some(Box::pin(async move { look(&admin, events).await }));
                }
            }
            found = async { asked.as_mut().expect("it is only polled then").await }, if asked.is_some() => {
                asked = None;
                match found {
                    Ok(found) => {
                        seen.take(found, args.window);
                        trouble = None;
                    }
                    Err(error) => trouble = Some(error.to_string()),
                }
            }
        }
    }
}

/// What is typed, from a thread of its own: reading a terminal blocks. The thread ends with the process.
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
    fn a_look_can_be_printed() {
        let (history, events) = history();
        let text = text(&Picture::of(&history, &events).unwrap());
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("cluster c: controller 1 leads"), "{text}");
        let functions = lines.iter().position(|&line| line == "Functions").unwrap();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(lines[functions + 1])[..3], ["FUNCTION", "REQ/S", "FAIL/S"]);
        assert_eq!(words(lines[functions + 2])[..3], ["default/digits", "50.0", "2.0"]);
        assert!(lines.iter().all(|line| line.trim_end() == *line), "{text}");
    }

    #[test]
    fn nobody_is_asked_all_the_time() {
        assert!(looks_every("1ms").is_err());
        assert_eq!(looks_every("500ms").unwrap(), Duration::from_millis(500));
        assert!(looks_every("soon").is_err());
        assert!(looks_back("11m").is_err() && looks_back("10m").is_ok());
    }
}
