//! The output of a program, forwarded line by line to the worker's log under the function's name. The lines
//! per second are bounded, and the number of omitted lines is logged.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use millrace_types::Timestamp;
use tokio::io::AsyncRead;

use crate::clock::Clock;
use crate::process_port::stderr::lines;

/// Maximum number of lines of a process that are logged per second.
pub(super) const LINES_PER_SECOND_MAX: u32 = 100;
/// Maximum number of characters that are remembered of the last line.
const LAST_LINE_CHARS: usize = 200;

/// The last logged line of a process, or its first characters.
pub(super) type LastLine = Rc<RefCell<String>>;

/// Forwards the lines of standard output and standard error, until the process closes both.
pub(super) async fn forward(
    output: impl AsyncRead + Unpin,
    errors: impl AsyncRead + Unpin,
    function: Rc<str>,
    process: u32,
    clock: &dyn Clock,
    last: &LastLine,
) {
    let window = Shared { window: RefCell::new(Window::new(clock.now())), clock, last };
    tokio::join!(one(output, &window, &function, process), one(errors, &window, &function, process));
}

/// The state that both streams of a process share: the window, its clock, and the last line.
struct Shared<'a> {
    window: RefCell<Window>,
    clock: &'a dyn Clock,
    last: &'a LastLine,
}

async fn one(output: impl AsyncRead + Unpin, shared: &Shared<'_>, function: &str, process: u32) {
    let Shared { window, clock, last } = shared;
    let discard = |bytes: &[u8]| window.borrow_mut().discard(clock.now(), bytes);
    let say = |line: &str| match window.borrow_mut().take(clock.now()) {
        None => {}
        Some(left_out) => {
            if left_out > 0 {
                tracing::warn!(
                    target: "millrace_worker::function",
                    %function,
                    process,
                    left_out,
                    "the process writes more lines than are logged"
                );
            }
            tracing::info!(target: "millrace_worker::function", %function, process, "{line}");
            *last.borrow_mut() = line.chars().take(LAST_LINE_CHARS).collect();
        }
    };
    if let Err(error) = lines(output, discard, say).await {
        tracing::warn!(%function, process, %error, "cannot read the output of a function's process");
    }
}

struct Window {
    began: Timestamp,
    lines: u32,
    left_out: u64,
}

impl Window {
    fn new(began: Timestamp) -> Self {
        Self { began, lines: 0, left_out: 0 }
    }

    /// Returns whether bytes are omitted before they are split into lines, because the window is full.
    fn discard(&mut self, now: Timestamp, bytes: &[u8]) -> bool {
        self.roll(now);
        let full = self.lines >= LINES_PER_SECOND_MAX;
        if full {
            self.left_out += bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        }
        full
    }

    fn roll(&mut self, now: Timestamp) {
        if now.since(self.began) >= Duration::from_secs(1) {
            self.began = now;
            self.lines = 0;
        }
    }

    /// Returns the number of lines omitted since the last logged line, or `None` if this line is omitted
    /// too.
    fn take(&mut self, now: Timestamp) -> Option<u64> {
        self.roll(now);
        if self.lines >= LINES_PER_SECOND_MAX {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_over_the_rate_are_omitted_and_counted() {
        let began = Timestamp(7);
        let mut window = Window::new(began);
        let logged = (0..LINES_PER_SECOND_MAX + 5).filter(|_| window.take(began).is_some()).count();
        assert_eq!(logged, LINES_PER_SECOND_MAX as usize);
        assert!(window.discard(began, b"one\ntwo\nthr"));
        let later = began + Duration::from_secs(1);
        assert!(!window.discard(later, b"ee\n"));
        assert_eq!(window.take(later), Some(5 + 2));
    }
}
