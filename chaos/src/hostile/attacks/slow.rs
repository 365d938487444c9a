//! Slow clients: the headers or the body of a request arrive a byte at a time, in HTTP/1 and in
//! HTTP/2.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::hostile::attacker::Attacker;
use crate::hostile::port::PortKind;
use crate::hostile::wire::{self, flag, kind};

/// Number of clients of each port at a time.
const SENDERS: usize = 24;
/// Interval between two bytes.
const BYTE_EVERY: Duration = Duration::from_millis(200);
/// Maximum bytes of a connection.
const BYTES_MAX: usize = 10_000;
/// Maximum number of successive connections of a client.
const CONNECTIONS_MAX: usize = 1_000;
/// Number of announced bytes of a body.
const BODY: usize = 1 << 20;

#[derive(Debug, Clone, Copy)]
enum SlowSender {
    Headers,
    Body,
    Http2Headers,
    Http2Body,
}

const SENDERS_OF_EACH: [SlowSender; 4] =
    [SlowSender::Headers, SlowSender::Body, SlowSender::Http2Headers, SlowSender::Http2Body];

pub(super) async fn run(mut attacker: Attacker) {
    let mut senders = JoinSet::new();
    for &sender in SENDERS_OF_EACH.iter().cycle().take(SENDERS) {
        senders.spawn(send(sender, attacker.another()));
    }
    senders.join_all().await;
}

async fn send(sender: SlowSender, mut attacker: Attacker) {
    for _ in 0..CONNECTIONS_MAX {
        if let Some(stream) = attacker.connect().await {
            let kind = attacker.port.kind;
            let begun = beginning(sender, kind, &attacker.function);
            let pieces = (0..BYTES_MAX).map(|at| piece(sender, kind, at));
            attacker.send_slowly(stream, &begun, pieces, BYTE_EVERY).await;
        }
        tokio::time::sleep(BYTE_EVERY).await;
    }
}

/// Returns the bytes that are sent at once.
fn beginning(sender: SlowSender, port: PortKind, function: &str) -> Vec<u8> {
    match sender {
        SlowSender::Headers => Vec::new(),
        SlowSender::Body => wire::post(&wire::infer(function), &[], BODY, b"{"),
        SlowSender::Http2Headers => wire::opening(),
        SlowSender::Http2Body => {
            let headers = wire::headers(&wire::grpc(wire::methods(port)[0]));
            let headers = wire::frame(kind::HEADERS, flag::END_HEADERS, 1, &headers);
            let begun = wire::frame(kind::DATA, flag::NONE, 1, &wire::prefixed(false, BODY, &[]));
            [wire::opening(), headers, begun].concat()
        }
    }
}

/// Returns the byte at a position, in a frame for the body of an HTTP/2 request.
fn piece(sender: SlowSender, port: PortKind, at: usize) -> Vec<u8> {
    const HEADERS: &[u8] = b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ";
    match sender {
        SlowSender::Headers => vec![HEADERS.get(at).copied().unwrap_or(b'x')],
        SlowSender::Body => vec![b' '],
        SlowSender::Http2Headers => {
            let list = wire::headers(&wire::grpc(wire::methods(port)[0]));
            let frame = wire::frame_of_length(wire::FRAME_MAX, kind::HEADERS, flag::END_HEADERS, 1, &list);
            vec![frame.get(at).copied().unwrap_or(0)]
        }
        SlowSender::Http2Body => wire::frame(kind::DATA, flag::NONE, 1, &[0]),
    }
}
