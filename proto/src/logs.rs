//! The last log lines of a process, kept in memory for whoever asks: no file and no collector is needed
//! for that.
//!
//! In: every line that is logged. Out: those after a position that fit a filter, a page at a time. Bounded by
//! [`LINES_MAX`]: the oldest go. Whoever logs never waits: a line that finds the ring in use is left
//! out, and so are those that went before they were read; a reader is told how many.
//!
//! There is one ring in a process, as there is one log: [`keep_here`] makes it, [`here`] reads it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use crate::log::{Filter, Line, Page, Position, Query};
use crate::pages::PageRoom;

/// Lines that are kept.
pub const LINES_MAX: usize = 4_096;
/// Lines that are given at a time, and how many where nothing is said.
pub const PAGE_MAX: u32 = 1_000;
/// The longest message or value that is kept, in bytes: some are a client's words.
pub const TEXT_BYTES_MAX: usize = 2_048;
/// Fields of a line that are kept.
pub const FIELDS_MAX: usize = 32;

/// The processes that are controllers and workers at once and are called neither: of `millrace up` and of
/// `millrace demo`. A worker may have such a name too.
pub const SHARED: [&str; 2] = [UP, DEMO];
/// The process of `millrace up`.
pub const UP: &str = "up";
/// The process of `millrace demo`.
pub const DEMO: &str = "demo";

/// What lines, and the spans around them, call a function and a request.
const FUNCTIONS: [&str; 2] = ["function", "millrace.function"];
const REQUESTS: [&str; 3] = ["request", "request_id", crate::trace::REQUEST_ID];

static HERE: OnceLock<Ring> = OnceLock::new();

/// The name of a process's ring: of a run that no other has. `began`: nanoseconds of the clock on the wall.
#[must_use]
pub fn ring_name(process: &str, pid: u32, began: u128) -> String {
    format!("{process}.{pid}.{began:x}")
}

/// The process that a ring of such a name is of.
#[must_use]
pub fn process_of(ring: &str) -> Option<&str> {
    ring.rsplitn(3, '.').nth(2)
}

/// Keeps the lines of this process from now on, once. `name` is the ring's, see [`ring_name`].
pub fn keep_here(process: &str, name: String) -> &'static Ring {
    HERE.get_or_init(|| Ring::new(process, name))
}

/// The lines of this process; of one that keeps none, nothing.
#[must_use]
pub fn here(query: &Query) -> Page {
    HERE.get().map(|ring| ring.page(query)).unwrap_or_default()
}

/// What is kept.
#[derive(Debug)]
pub struct Ring {
    name: String,
    process: String,
    kept: Mutex<Kept>,
    /// Lines that found the ring in use since the last that did not.
    missed: AtomicU64,
}

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<Arc<Line>>,
    /// The number of the last line.
    last: u64,
}

impl Ring {
    /// Keeps nothing yet.
    #[must_use]
    pub fn new(process: &str, name: String) -> Self {
        let (kept, missed) = (Mutex::default(), AtomicU64::new(0));
        Self { name, process: process.to_owned(), kept, missed }
    }

    /// Keeps a line, unless somebody else has the ring at this moment.
    pub fn keep(&self, mut line: Line) {
        cut(&mut line.message);
        while line.fields.len() > FIELDS_MAX {
            line.fields.pop_last();
        }
        line.fields.values_mut().for_each(cut);
        line.process.clone_from(&self.process);
        let mut kept = match self.kept.try_lock() {
            Ok(kept) => kept,
            // A push that panicked left the list whole.
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
        // Freed outside the lock.
        drop(kept);
        drop(oldest);
    }

    /// The lines after a position that fit.
    #[must_use]
    pub fn page(&self, query: &Query) -> Page {
        let filter = query.filter.clone().unwrap_or_default();
        let max = if query.lines_max == 0 { PAGE_MAX } else { query.lines_max.min(PAGE_MAX) } as usize;
        let after = query.after.iter().find(|it| it.ring == self.name).map(|it| it.seq);
        let (rest, last) = self.after(after.unwrap_or(0));
        // Without a position what went before the oldest is nobody's loss.
        let from = after.unwrap_or_else(|| rest.first().map_or(last, |first| first.seq - 1));
        let (mut lines, mut left_out_before) = (Vec::new(), Vec::new());
        let (mut seq, mut looked) = (last, 0);
        let left_out = |seq: u64, looked| seq.saturating_sub(from).saturating_sub(looked);
        let mut room = PageRoom::default();
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
        let (next, left_out) = (Position { ring: self.name.clone(), seq }, left_out(seq, looked));
        Page { next: Some(next), lines, left_out, from, left_out_before, more }
    }

    /// Only references are copied while others may want to write.
    fn after(&self, seq: u64) -> (Vec<Arc<Line>>, u64) {
        let kept = self.kept();
        (kept.lines.iter().filter(|line| line.seq > seq).cloned().collect(), kept.last)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cuts a text to its bound.
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

    fn ring() -> Ring {
        Ring::new("worker-1", "worker-1.7".into())
    }

    fn texts(page: &Page) -> Vec<&str> {
        page.lines.iter().map(|line| line.message.as_str()).collect()
    }

    #[test]
    fn a_ring_is_known_to_be_of_its_process() {
        for process in ["worker-1", "rack.3.worker", "up"] {
            assert_eq!(process_of(&ring_name(process, 4_711, 1 << 60)), Some(process));
        }
        assert_eq!(process_of("worker-1.7"), None);
    }

    #[test]
    fn a_reader_goes_on_where_it_was() {
        let ring = ring();
        assert_eq!(ring.page(&Query::default()).lines, []);
        for text in ["a", "b", "c"] {
            ring.keep(line(Level::Info, text, &[]));
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
    fn a_page_of_long_lines_ends_at_its_bytes_and_says_that_there_are_more() {
        let ring = ring();
        let text = "x".repeat(TEXT_BYTES_MAX);
        let fields: Vec<_> = (0..FIELDS_MAX).map(|n| format!("field{n}")).collect();
        let fields: Vec<_> = fields.iter().map(|name| (name.as_str(), text.as_str())).collect();
        for _ in 0..40 {
            ring.keep(line(Level::Info, &text, &fields));
        }
        let (mut seen, mut after) = (Vec::new(), Vec::new());
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
    fn what_went_or_never_came_is_counted() {
        let ring = ring();
        ring.keep(line(Level::Info, "first", &[]));
        let next = ring.page(&Query::default()).next;
        let held = ring.kept();
        ring.keep(line(Level::Info, "nobody waits", &[]));
        drop(held);
        for n in 0..=LINES_MAX {
            ring.keep(line(Level::Info, &n.to_string(), &[]));
        }
        let after: Vec<_> = next.into_iter().collect();
        let mut page = ring.page(&Query { after, ..Query::default() });
        // One found the ring in use, and one went for the last.
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
    fn lines_are_found_by_level_function_request_and_time() {
        let ring = ring();
        ring.keep(line(Level::Warn, "w", &[("function", "acme/digits@3")]));
        ring.keep(line(
            Level::Info,
            "i",
            &[("millrace.function", "digits"), (crate::trace::REQUEST_ID, "r1")],
        ));
        ring.keep(line(Level::Debug, "d", &[("function", "acme/other")]));
        let found = |filter: Filter| {
            let page = ring.page(&Query { filter: Some(filter), ..Query::default() });
            assert_eq!(page.next.as_ref().map(|it| it.seq), Some(3), "all were looked at");
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
    fn a_line_is_bounded() {
        let ring = ring();
        let long = "ü".repeat(TEXT_BYTES_MAX);
        let mut all = line(Level::Info, &long, &[]);
        all.fields = (0..2 * FIELDS_MAX).map(|n| (format!("f{n:03}"), long.clone())).collect();
        ring.keep(all);
        let kept = &ring.page(&Query::default()).lines[0];
        assert!(kept.message.len() <= TEXT_BYTES_MAX && kept.fields.len() == FIELDS_MAX);
        assert!(kept.fields.values().all(|value| value.len() <= TEXT_BYTES_MAX));
    }
}
