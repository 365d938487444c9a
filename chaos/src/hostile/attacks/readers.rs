//! Clients that do not read their answers: HTTP/2 with a window of 0, and HTTP/1 pipelines over a
//! small receive buffer.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;

use crate::hostile::attacker::{Attacker, DiscardingConnection};
use crate::hostile::port::PortKind;
use crate::hostile::wire::{self, flag, kind};

/// Interval between the starts of two readers.
const EVERY: Duration = Duration::from_millis(500);
/// Maximum number of readers of a port.
const READERS_MAX: usize = 64;
/// Number of streams that wait for the window of a connection.
const STREAMS: u32 = 100;
/// Number of requests in a pipeline.
const PIPELINE: usize = 200;
/// Bytes of the receive buffer for the pipeline's answers.
const RECEIVE_BUFFER: u32 = 4 << 10;
/// Rows of an inference with an answer of a mebibyte.
const ROWS: usize = 4_096;
/// Bytes of a row of 64 numbers.
const ROW: usize = 64 * 4;
/// The identifier of SETTINGS_INITIAL_WINDOW_SIZE.
const INITIAL_WINDOW: u16 = 4;

pub(super) async fn run(mut attacker: Attacker) {
    let mut readers = JoinSet::new();
    for number in 0..READERS_MAX {
        match number % 3 {
            0 => readers.spawn(closed_window(attacker.another())),
            1 => readers.spawn(unread_pipeline(attacker.another())),
            _ => readers.spawn(unread_tensor(attacker.another())),
        };
        tokio::time::sleep(EVERY).await;
    }
    readers.join_all().await;
}

/// Opens many streams at the same time, with no window for their answers.
async fn closed_window(mut attacker: Attacker) {
    let Some(stream) = attacker.connect().await else { return };
    let mut deaf = DiscardingConnection::to(stream, attacker.pace.clone());
    let request = match attacker.port.kind {
        PortKind::Client => wire::headers(&wire::get("/metrics")),
        PortKind::Internal | PortKind::Worker => wire::tiny_request(attacker.port.kind),
    };
    let settings = wire::frame(kind::SETTINGS, flag::NONE, 0, &wire::setting(INITIAL_WINDOW, 0));
    let ends = flag::END_HEADERS | flag::END_STREAM;
    let streams = (0..STREAMS).flat_map(|number| wire::frame(kind::HEADERS, ends, 2 * number + 1, &request));
    let bytes = [wire::PREFACE, &settings, &streams.collect::<Vec<_>>()].concat();
    attacker.counts.sent(STREAMS.into());
    attacker.write(&mut deaf.write, &bytes).await;
    deaf.closed().await;
    attacker.counts.ended();
}

/// Sends a pipeline and leaves the answers unread.
async fn unread_pipeline(mut attacker: Attacker) {
    let Some(mut stream) = attacker.connect_with(Some(RECEIVE_BUFFER)).await else { return };
    let request = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".repeat(PIPELINE);
    attacker.counts.sent(PIPELINE as u64);
    attacker.write(&mut stream, &request).await;
    // A server that gives up resets the connection, which the next write detects.
    while stream.write_all(b" ").await.is_ok() {
        tokio::time::sleep(EVERY).await;
    }
    attacker.counts.ended();
}

/// Makes a valid inference with a large answer, and offers no window for the answer.
async fn unread_tensor(mut attacker: Attacker) {
    let shape = [wire::varint(ROWS as u64), wire::varint(ROW as u64 / 4)].concat();
    let tensor = [wire::field(1, b"x"), wire::field(2, b"FP32"), wire::field(3, &shape)].concat();
    let request = [
        wire::field(1, attacker.function.as_bytes()),
        wire::field(5, &tensor),
        wire::field(7, &vec![0; ROWS * ROW]),
    ];
    let method = wire::methods(attacker.port.kind)[0];
    let message = wire::message(false, &request.concat());
    attacker.call_with_window(method, None, message, Some(0)).await;
}
