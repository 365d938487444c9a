//! Messages that are small until they are decoded: tensors and fields of nothing, groups in groups, many
//! small elements, lengths beyond the message.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use rand::Rng as _;

use crate::hostile::PortKind;
use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_secs(2);
const REQUESTS_MAX: usize = 1_000;
/// Bytes of one message: within the limits of every port.
const MESSAGE: usize = 2 << 20;

/// The kinds of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// A field without content, again and again.
    Repeated(u32),
    /// A field in a field, and so on.
    Nested(u32),
    /// A group begins, and never ends.
    EndlessGroup,
    /// A field that says that it is longer than any message.
    Overlong,
}

/// The fields of which there are messages.
const FIELDS: std::ops::Range<u32> = 1..16;

static MESSAGES: LazyLock<HashMap<Kind, Bytes>> = LazyLock::new(|| {
    let ports = [PortKind::Client, PortKind::Internal, PortKind::Worker];
    let nested = ports.map(|port| Kind::Nested(tensors(port)));
    let all = FIELDS.map(Kind::Repeated).chain(nested).chain([Kind::EndlessGroup, Kind::Overlong]);
    all.map(|kind| (kind, wire::message(false, &kind.bytes()))).collect()
});

/// Writes what is sent later: that is no part of the attacks' time.
pub(super) fn prepare() {
    LazyLock::force(&MESSAGES);
}

pub(super) async fn run(mut attacker: Attacker) {
    let methods = wire::methods(attacker.port.kind);
    for number in 0..REQUESTS_MAX {
        let method = methods[attacker.rng.random_range(0..methods.len())];
        let kind = match number % 5 {
            0 => Kind::Repeated(tensors(attacker.port.kind)),
            1 => Kind::Repeated(attacker.rng.random_range(FIELDS)),
            2 => Kind::Nested(tensors(attacker.port.kind)),
            3 => Kind::EndlessGroup,
            _ => Kind::Overlong,
        };
        attacker.call(method, None, MESSAGES[&kind].clone()).await;
        tokio::time::sleep(EVERY).await;
    }
}

impl Kind {
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Repeated(field) => repeat(&wire::field(field, &[])),
            Self::Nested(field) => nested(field),
            Self::EndlessGroup => repeat(&[0x0b]),
            Self::Overlong => [wire::varint(0x2a), wire::varint(u64::MAX), vec![0; 64]].concat(),
        }
    }
}

/// The field that repeats tensors in the message of a port's first method, or any.
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

/// A field in a field, 50,000 times, each as long as what it holds.
fn nested(number: u32) -> Vec<u8> {
    const DEPTH: usize = 50_000;
    let tag = wire::varint(u64::from(number << 3 | 2));
    // From the inside out, and therefore backwards.
    let mut backwards = Vec::new();
    for _ in 0..DEPTH {
        let length = wire::varint(backwards.len() as u64);
        backwards.extend(length.iter().rev().chain(tag.iter().rev()));
    }
    backwards.reverse();
    backwards
}
