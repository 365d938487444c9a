//! Progress on stderr, shown only on a terminal.

use std::borrow::Cow;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The interval at which a waiting line moves.
const TICK: Duration = Duration::from_millis(100);

/// Returns a progress bar that counts bytes.
pub(crate) fn bytes(total: u64, what: impl Into<Cow<'static, str>>) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    );
    ProgressBar::new(total).with_style(style.expect("the template is constant")).with_message(what)
}

/// Returns a line that names the awaited condition.
pub(crate) fn waiting(what: impl Into<Cow<'static, str>>) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let bar =
        ProgressBar::new_spinner().with_style(style.expect("the template is constant")).with_message(what);
    bar.enable_steady_tick(TICK);
    bar
}
