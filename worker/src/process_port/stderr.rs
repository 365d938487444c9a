//! What an executor writes to its standard error, line by line into the worker's log.

use millrace_types::{GpuIndex, Incarnation};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::ChildStderr;

/// The longest line that is logged whole; a longer one is logged in parts.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Forwards lines until the executor closes its end.
pub(super) async fn forward(output: ChildStderr, gpu: GpuIndex, incarnation: Incarnation) {
    let mut lines = BufReader::with_capacity(LINE_BYTES_MAX, output);
    let mut line = Vec::new();
    loop {
        let (used, whole) = match lines.fill_buf().await {
            Ok([]) => break,
            Ok(bytes) => {
                let room = LINE_BYTES_MAX - line.len();
                let end = bytes.iter().take(room).position(|&byte| byte == b'\n');
                let used = end.map_or(bytes.len().min(room), |end| end + 1);
                line.extend_from_slice(&bytes[..used]);
                (used, end.is_some() || line.len() >= LINE_BYTES_MAX)
            }
            Err(error) => {
                tracing::warn!(%gpu, %incarnation, %error, "an executor's standard error");
                break;
            }
        };
        lines.consume(used);
        if whole {
            log(&line, gpu, incarnation);
            line.clear();
        }
    }
    if !line.is_empty() {
        log(&line, gpu, incarnation);
    }
}

fn log(line: &[u8], gpu: GpuIndex, incarnation: Incarnation) {
    let line = String::from_utf8_lossy(line);
    tracing::info!(target: "millrace_worker::executor", %gpu, %incarnation, "{}", line.trim_end());
}
