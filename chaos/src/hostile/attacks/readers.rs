//! Readers that read nothing: HTTP/2 with a window of 0, and pipelines of HTTP/1 over a small buffer whose
//! answers stay unread.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;

use crate::hostile::PortKind;
use crate::hostile::attacker::{Attacker, DiscardingConnection};
use crate::hostile::wire::{self, flag, kind};

/// The wait between two readers, and the readers of one port.
const EVERY: Duration = Duration::from_millis(500);
const READERS_MAX: usize = 64;
/// Streams of one connection that wait for its window.
const STREAMS: u32 = 100;
/// Requests in one pipeline, and the bytes that its socket takes of their answers.
const PIPELINE: usize = 200;
const RECEIVE_BUFFER: u32 = 4 << 10;
/// Rows of an inference whose answer is a mebibyte, of 64 numbers each.
const ROWS: usize = 4_096;
const ROW: usize = 64 * 4;
/// The setting SETTINGS_INITIAL_WINDOW_SIZE.
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

/// Many streams at a time, whose answers have no window.
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

/// A pipeline whose answers stay unread.
async fn unread_pipeline(mut attacker: Attacker) {
    let Some(mut stream) = attacker.connect_with(Some(RECEIVE_BUFFER)).await else { return };
    let request = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".repeat(PIPELINE);
    attacker.counts.sent(PIPELINE as u64);
    attacker.write(&mut stream, &request).await;
    // A server that gives up resets the connection, which a write finds.
    while stream.write_all(b" ").await.is_ok() {
        tokio::time::sleep(EVERY).await;
    }
    attacker.counts.ended();
}

/// A large answer of an inference that is right, with no window for it.
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
