//! Messages that are small until they are decoded: empty tensors and fields, nested groups, many
//! small elements, and lengths beyond the message.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use rand::Rng as _;

use crate::hostile::attacker::Attacker;
use crate::hostile::port::PortKind;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_secs(2);
const REQUESTS_MAX: usize = 1_000;
/// Bytes of a message, within the limits of every port.
const MESSAGE: usize = 2 << 20;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum MessageKind {
    /// An empty field, repeated.
    Repeated(u32),
    /// A field nested in itself.
    Nested(u32),
    /// Groups that begin and never end.
    EndlessGroup,
    /// A field that claims to be longer than any message.
    Overlong,
}

/// The field numbers of the repeated messages.
const FIELDS: std::ops::Range<u32> = 1..16;

static MESSAGES: LazyLock<HashMap<MessageKind, Bytes>> = LazyLock::new(|| {
    let ports = [PortKind::Client, PortKind::Internal, PortKind::Worker];
    let nested = ports.map(|port| MessageKind::Nested(tensors(port)));
    let all = FIELDS
        .map(MessageKind::Repeated)
        .chain(nested)
        .chain([MessageKind::EndlessGroup, MessageKind::Overlong]);
    all.map(|kind| (kind, wire::message(false, &kind.bytes()))).collect()
});

/// Builds the messages in advance, so that the attackers' share is not spent on this work.
pub(super) fn prepare() {
    LazyLock::force(&MESSAGES);
}

pub(super) async fn run(mut attacker: Attacker) {
    let methods = wire::methods(attacker.port.kind);
    for number in 0..REQUESTS_MAX {
        let method = methods[attacker.rng.random_range(0..methods.len())];
        let kind = match number % 5 {
            0 => MessageKind::Repeated(tensors(attacker.port.kind)),
            1 => MessageKind::Repeated(attacker.rng.random_range(FIELDS)),
            2 => MessageKind::Nested(tensors(attacker.port.kind)),
            3 => MessageKind::EndlessGroup,
            _ => MessageKind::Overlong,
        };
        attacker.call(method, None, MESSAGES[&kind].clone()).await;
        tokio::time::sleep(EVERY).await;
    }
}

impl MessageKind {
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Repeated(field) => repeat(&wire::field(field, &[])),
            Self::Nested(field) => nested(field),
            Self::EndlessGroup => repeat(&[0x0b]),
            Self::Overlong => [wire::varint(0x2a), wire::varint(u64::MAX), vec![0; 64]].concat(),
        }
    }
}

/// Returns the number of the field that repeats tensors in the message of a port's first method, or
/// of another repeated field.
fn tensors(kind: PortKind) -> u32 {
    match kind {
        PortKind::Client => 5,
        PortKind::Internal => 3,
        PortKind::Worker => 9,
    }
}

fn repeat(field: &[u8]) -> Vec<u8> {
    field.repeat(MESSAGE / field.len())
}

/// Returns a field nested 50,000 deep, each level with the length of its content.
fn nested(number: u32) -> Vec<u8> {
    const DEPTH: usize = 50_000;
    let tag = wire::varint(u64::from(number << 3 | 2));
    // Built from the inside out, and therefore backwards.
    let mut backwards = Vec::new();
    for _ in 0..DEPTH {
        let length = wire::varint(backwards.len() as u64);
        backwards.extend(length.iter().rev().chain(tag.iter().rev()));
    }
    backwards.reverse();
    backwards
}
