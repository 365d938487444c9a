//! The standard error of an executor, forwarded line by line to the worker's log.

use std::io;

use millrace_types::{GpuIndex, Incarnation};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::ChildStderr;

/// Maximum size of a logged line in bytes. A longer line is logged in parts.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Forwards lines until the executor closes its standard error.
pub(super) async fn forward(output: ChildStderr, gpu: GpuIndex, incarnation: Incarnation) {
    let log = |line: &str| tracing::info!(target: "millrace_worker::executor", %gpu, %incarnation, "{line}");
    if let Err(error) = lines(output, |_| false, log).await {
        tracing::warn!(%gpu, %incarnation, %error, "cannot read an executor's standard error");
    }
}

/// Calls `on_line` with each line until the output ends. Bytes for which `discard` returns true are skipped
/// before they are split into lines.
pub(crate) async fn lines(
    output: impl AsyncRead + Unpin,
    mut discard: impl FnMut(&[u8]) -> bool,
    mut on_line: impl FnMut(&str),
) -> io::Result<()> {
    let mut output = BufReader::with_capacity(LINE_BYTES_MAX, output);
    let mut line = Vec::new();
    loop {
        let bytes = output.fill_buf().await?;
        let ended = bytes.is_empty();
        let left = bytes.len();
        if !ended && discard(bytes) {
            output.consume(left);
            line.clear();
            tokio::task::yield_now().await;
            continue;
        }
        let room = LINE_BYTES_MAX - line.len();
        let newline = bytes.iter().take(room).position(|&byte| byte == b'\n');
        let used = newline.map_or(bytes.len().min(room), |at| at + 1);
        line.extend_from_slice(&bytes[..used]);
        output.consume(used);
        let whole = newline.is_some() || line.len() >= LINE_BYTES_MAX || ended;
        if whole && !line.is_empty() {
            on_line(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
        if ended {
            return Ok(());
        }
        if used == left {
            // Yields to the other tasks of the actor thread, so that a flood of output does not starve
            // them.
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines_of(output: &[u8]) -> Vec<String> {
        let mut seen = Vec::new();
        lines(output, |_| false, |line| seen.push(line.to_owned())).await.unwrap();
        seen
    }

    #[tokio::test]
    async fn lines_are_delivered_one_by_one_including_an_unterminated_last_line() {
        assert_eq!(lines_of(b"one\n\ntwo\xff\nthree").await, ["one", "", "two\u{fffd}", "three"]);
        assert_eq!(lines_of(b"").await, [""; 0]);
    }

    #[tokio::test]
    async fn a_line_without_end_is_logged_in_parts() {
        let parts = lines_of(&[b'x'; 2 * LINE_BYTES_MAX + 1]).await;
        assert_eq!(parts.iter().map(String::len).collect::<Vec<_>>(), [LINE_BYTES_MAX, LINE_BYTES_MAX, 1]);
    }
}
