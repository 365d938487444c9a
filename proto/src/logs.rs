//! A ring of a process's last log lines in memory, so that logs can be read without a file or a
//! collector.
//!
//! Every logged line enters the ring; readers get the lines after a position that match a filter, a
//! page at a time. The ring holds [`LINES_MAX`] lines and drops the oldest first. A writer never
//! waits: a line that finds the ring locked is dropped. A reader learns how many lines were
//! dropped, or left the ring before they were read.
//!
//! A process has a single ring, like a single log: [`init_log_ring`] creates the ring and [`local_page`]
//! reads it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use crate::log::{Filter, Line, Page, Position, Query};
use crate::pages::PageBudget;

/// Maximum number of lines in the ring.
pub const LINES_MAX: usize = 4_096;
/// Maximum number of lines in a page, and the default.
pub const PAGE_MAX: u32 = 1_000;
/// Maximum length of a stored message or value, in bytes. Some of them are text of clients.
pub const TEXT_BYTES_MAX: usize = 2_048;
/// Maximum number of stored fields of a line.
pub const FIELDS_MAX: usize = 32;

/// The names of processes that are controllers and workers at once: those of `millrace up` and
/// `millrace demo`. A worker may have the same name.
pub const SHARED: [&str; 2] = [UP, DEMO];
/// The name of the process of `millrace up`.
pub const UP: &str = "up";
/// The name of the process of `millrace demo`.
pub const DEMO: &str = "demo";

/// The field names under which lines, and the spans around them, have a function and a request.
const FUNCTIONS: [&str; 2] = ["function", "millrace.function"];
const REQUESTS: [&str; 3] = ["request", "request_id", crate::trace::REQUEST_ID];

static HERE: OnceLock<LogRing> = OnceLock::new();

/// Returns a ring's name, unique among all runs of the process. `began` is the start time, in
/// nanoseconds of the wall clock.
#[must_use]
pub fn ring_name(process: &str, pid: u32, began: u128) -> String {
    format!("{process}.{pid}.{began:x}")
}

/// Returns the process name that is part of a ring's name.
#[must_use]
pub fn process_of(ring: &str) -> Option<&str> {
    ring.rsplitn(3, '.').nth(2)
}

/// Creates the ring of this process on the first call. `name` is a [`ring_name`].
pub fn init_log_ring(process: &str, name: String) -> &'static LogRing {
    HERE.get_or_init(|| LogRing::new(process, name))
}

/// Returns a page of this process's lines; an empty page if the process has no ring.
#[must_use]
pub fn local_page(query: &Query) -> Page {
    HERE.get().map(|ring| ring.page(query)).unwrap_or_default()
}

/// A bounded ring of log lines.
#[derive(Debug)]
pub struct LogRing {
    name: String,
    process: String,
    kept: Mutex<LogLines>,
    /// Lines that found the ring locked since the last stored line.
    missed: AtomicU64,
}

#[derive(Debug, Default)]
struct LogLines {
    lines: VecDeque<Arc<Line>>,
    /// The number of the last line, dropped lines included.
    last: u64,
}

impl LogRing {
    /// Creates an empty ring.
    #[must_use]
    pub fn new(process: &str, name: String) -> Self {
        Self { name, process: process.to_owned(), kept: Mutex::default(), missed: AtomicU64::new(0) }
    }

    /// Stores a line, unless another thread holds the lock: a writer must not wait.
    pub fn store_line(&self, mut line: Line) {
        cut(&mut line.message);
        while line.fields.len() > FIELDS_MAX {
            line.fields.pop_last();
        }
        line.fields.values_mut().for_each(cut);
        line.process.clone_from(&self.process);
        let mut kept = match self.kept.try_lock() {
            Ok(kept) => kept,
            // The list is whole even if a thread panicked while it held the lock.
            Err(TryLockError::Poisoned(kept)) => kept.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.missed.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        kept.last += self.missed.swap(0, Ordering::Relaxed) + 1;
        line.seq = kept.last;
        let oldest = if kept.lines.len() >= LINES_MAX { kept.lines.pop_front() } else { None };
        kept.lines.push_back(Arc::new(line));
        // The oldest line is freed outside the lock.
        drop(kept);
        drop(oldest);
    }

    /// Returns the lines after a position that match the filter.
    #[must_use]
    pub fn page(&self, query: &Query) -> Page {
        let filter = query.filter.clone().unwrap_or_default();
        let max = if query.lines_max == 0 { PAGE_MAX } else { query.lines_max.min(PAGE_MAX) } as usize;
        let after = query.after.iter().find(|it| it.ring == self.name).map(|it| it.seq);
        let (rest, last) = self.after(after.unwrap_or(0));
        // Without a position, lines from before the oldest stored line do not count as left out.
        let from = after.unwrap_or_else(|| rest.first().map_or(last, |first| first.seq - 1));
        let mut lines = Vec::new();
        let mut left_out_before = Vec::new();
        let mut seq = last;
        let mut looked = 0;
        let left_out = |seq: u64, looked| seq.saturating_sub(from).saturating_sub(looked);
        let mut room = PageBudget::default();
        let mut more = false;
        for line in &rest {
            let is_wanted = fits(&filter, line);
            if is_wanted && (lines.len() == max || !room.take(&**line)) {
                more = true;
                break;
            }
            looked += 1;
            seq = line.seq;
            if is_wanted {
                lines.push(Line::clone(line));
                left_out_before.push(left_out(seq, looked));
            }
        }
        let left_out = left_out(seq, looked);
        let next = Position { ring: self.name.clone(), seq };
        Page { next: Some(next), lines, left_out, from, left_out_before, more }
    }

    /// Copies only references, so that writers find the lock free again soon.
    fn after(&self, seq: u64) -> (Vec<Arc<Line>>, u64) {
        let kept = self.kept();
        (kept.lines.iter().filter(|line| line.seq > seq).cloned().collect(), kept.last)
    }

    fn kept(&self) -> MutexGuard<'_, LogLines> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cuts a text to [`TEXT_BYTES_MAX`].
fn cut(text: &mut String) {
    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
}

fn fits(filter: &Filter, line: &Line) -> bool {
    let of = |names: &[&str], fits: &dyn Fn(&str) -> bool| {
        names.iter().filter_map(|&name| line.fields.get(name)).any(|value| fits(value))
    };
    let function = |value: &str| {
        let value = value.split('@').next().unwrap_or(value);
        value == filter.function || value.split('/').next_back() == Some(filter.function.as_str())
    };
    let moment = |it: &prost_types::Timestamp| (it.seconds, it.nanos);
    line.level >= filter.at_least
        && filter.since.as_ref().is_none_or(|since| line.time.as_ref().map(moment) >= Some(moment(since)))
        && (filter.function.is_empty() || of(&FUNCTIONS, &function))
        && (filter.request_id.is_empty() || of(&REQUESTS, &|value| value == filter.request_id))
}

#[cfg(test)]
mod tests {
    use millrace_types::limits::PAGE_BYTES_MAX;
    use prost::Message as _;

    use super::*;
    use crate::log::Level;

    fn line(level: Level, message: &str, fields: &[(&str, &str)]) -> Line {
        let fields = fields.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let time = Some(prost_types::Timestamp { seconds: 100, nanos: 0 });
        Line { level: level.into(), message: message.into(), fields, time, ..Line::default() }
    }

    fn ring() -> LogRing {
        LogRing::new("worker-1", "worker-1.7".into())
    }

    fn texts(page: &Page) -> Vec<&str> {
        page.lines.iter().map(|line| line.message.as_str()).collect()
    }

    #[test]
    fn the_name_of_a_ring_has_the_process() {
        for process in ["worker-1", "rack.3.worker", "up"] {
            assert_eq!(process_of(&ring_name(process, 4_711, 1 << 60)), Some(process));
        }
        assert_eq!(process_of("worker-1.7"), None);
    }

    #[test]
    fn a_reader_continues_after_its_position() {
        let ring = ring();
        assert_eq!(ring.page(&Query::default()).lines, []);
        for text in ["a", "b", "c"] {
            ring.store_line(line(Level::Info, text, &[]));
        }
        let first = ring.page(&Query { lines_max: 2, ..Query::default() });
        assert_eq!((texts(&first), first.left_out), (vec!["a", "b"], 0));
        assert_eq!(first.lines[0].process, "worker-1");
        let after = vec![Position { ring: "controller-1.3".into(), seq: 9 }, first.next.unwrap()];
        let second = ring.page(&Query { after, ..Query::default() });
        assert_eq!(texts(&second), ["c"]);
        let rest = ring.page(&Query { after: second.next.into_iter().collect(), ..Query::default() });
        assert_eq!((texts(&rest).len(), rest.left_out), (0, 0));
    }

    #[test]
    fn a_page_of_long_lines_ends_at_its_byte_limit_and_reports_more() {
        let ring = ring();
        let text = "x".repeat(TEXT_BYTES_MAX);
        let fields: Vec<_> = (0..FIELDS_MAX).map(|n| format!("field{n}")).collect();
        let fields: Vec<_> = fields.iter().map(|name| (name.as_str(), text.as_str())).collect();
        for _ in 0..40 {
            ring.store_line(line(Level::Info, &text, &fields));
        }
        let mut seen = Vec::new();
        let mut after = Vec::new();
        loop {
            let page = ring.page(&Query { after, ..Query::default() });
            assert!(page.encoded_len() < PAGE_BYTES_MAX + 1_000 && page.left_out == 0);
            seen.extend(page.lines.iter().map(|line| line.seq));
            after = page.next.into_iter().collect();
            if !page.more {
                break;
            }
        }
        assert_eq!(seen, (1..=40).collect::<Vec<_>>());
    }

    #[test]
    fn dropped_and_overwritten_lines_are_counted() {
        let ring = ring();
        ring.store_line(line(Level::Info, "first", &[]));
        let next = ring.page(&Query::default()).next;
        let held = ring.kept();
        ring.store_line(line(Level::Info, "a writer never waits", &[]));
        drop(held);
        for n in 0..=LINES_MAX {
            ring.store_line(line(Level::Info, &n.to_string(), &[]));
        }
        let after: Vec<_> = next.into_iter().collect();
        let mut page = ring.page(&Query { after, ..Query::default() });
        // A line found the ring locked, and another was overwritten by the last one.
        assert_eq!((page.left_out, page.lines[0].message.as_str()), (2, "1"));
        assert_eq!((page.from, page.left_out_before[0]), (1, 2));
        let mut read = page.lines.len();
        while !page.lines.is_empty() {
            page = ring.page(&Query { after: page.next.into_iter().collect(), ..Query::default() });
            assert_eq!(page.left_out, 0);
            read += page.lines.len();
        }
        assert_eq!(read, LINES_MAX);
    }

    #[test]
    fn lines_are_filtered_by_level_function_request_and_time() {
        let ring = ring();
        ring.store_line(line(Level::Warn, "w", &[("function", "acme/digits@3")]));
        ring.store_line(line(
            Level::Info,
            "i",
            &[("millrace.function", "digits"), (crate::trace::REQUEST_ID, "r1")],
        ));
        ring.store_line(line(Level::Debug, "d", &[("function", "acme/other")]));
        let found = |filter: Filter| {
            let page = ring.page(&Query { filter: Some(filter), ..Query::default() });
            assert_eq!(page.next.as_ref().map(|it| it.seq), Some(3), "every line was examined");
            page.lines.into_iter().map(|line| line.message).collect::<String>()
        };
        assert_eq!(found(Filter { at_least: Level::Info.into(), ..Filter::default() }), "wi");
        assert_eq!(found(Filter { function: "digits".into(), ..Filter::default() }), "wi");
        assert_eq!(found(Filter { function: "acme/digits".into(), ..Filter::default() }), "w");
        assert_eq!(found(Filter { request_id: "r1".into(), ..Filter::default() }), "i");
        let since = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        assert_eq!(found(Filter { since: since(100), ..Filter::default() }), "wid");
        assert_eq!(found(Filter { since: since(101), ..Filter::default() }), "");
    }

    #[test]
    fn long_messages_and_fields_are_cut() {
        let ring = ring();
        let long = "ü".repeat(TEXT_BYTES_MAX);
        let mut all = line(Level::Info, &long, &[]);
        all.fields = (0..2 * FIELDS_MAX).map(|n| (format!("f{n:03}"), long.clone())).collect();
        ring.store_line(all);
        let kept = &ring.page(&Query::default()).lines[0];
        assert!(kept.message.len() <= TEXT_BYTES_MAX && kept.fields.len() == FIELDS_MAX);
        assert!(kept.fields.values().all(|value| value.len() <= TEXT_BYTES_MAX));
    }
}
