//! Messages that are small until they are decoded: tensors and fields of nothing, groups in groups, many
//! small elements, lengths beyond the message.

use std::time::Duration;

use rand::Rng as _;

use crate::hostile::PortKind;
use crate::hostile::attacker::Attacker;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_secs(2);
const REQUESTS_MAX: usize = 1_000;
/// Bytes of one message: within the limits of every port.
const MESSAGE: usize = 2 << 20;

pub(super) async fn run(mut attacker: Attacker) {
    let methods = wire::methods(attacker.port.kind);
    for number in 0..REQUESTS_MAX {
        let method = methods[attacker.rng.random_range(0..methods.len())];
        let bytes = match number % 5 {
            0 => repeat(&wire::field(tensors(attacker.port.kind), &[])),
            1 => repeat(&wire::field(attacker.rng.random_range(1..16), &[])),
            2 => nested(tensors(attacker.port.kind)),
            // A group begins, and never ends.
            3 => repeat(&[0x0b]),
            _ => [wire::varint(0x2a), wire::varint(u64::MAX), vec![0; 64]].concat(),
        };
        attacker.call(method, None, wire::message(false, &bytes)).await;
        tokio::time::sleep(EVERY).await;
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
