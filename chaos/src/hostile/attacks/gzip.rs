//! Messages that are small until they are decompressed: tensors without fields, zeros, and JSON.

use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;

use crate::hostile::attacker::Attacker;
use crate::hostile::port::PortKind;
use crate::hostile::wire;

const EVERY: Duration = Duration::from_secs(2);
const REQUESTS_MAX: usize = 1_000;
const MIB: usize = 1 << 20;

/// Input tensors without fields: 8 MiB in 8 KiB.
static TENSORS: LazyLock<Bytes> = LazyLock::new(|| wire::gzip(&[], &[0x2a, 0], 8 * MIB).into());
/// A raw tensor of 64 MiB of zeros.
static ZEROS: LazyLock<Bytes> = LazyLock::new(|| {
    let beginning = [wire::varint(7 << 3 | 2), wire::varint(64 << 20)].concat();
    wire::gzip(&beginning, &[0], 64 * MIB).into()
});
/// The first 32 MiB of a parameter that is an array.
static NUMBERS: LazyLock<Bytes> =
    LazyLock::new(|| wire::gzip(br#"{"inputs":[],"parameters":{"p":["#, b"0,", 32 * MIB).into());

/// Compresses the messages in advance, so that the attackers' share is not spent on compression.
pub(super) fn prepare() {
    for bomb in [&TENSORS, &ZEROS, &NUMBERS] {
        LazyLock::force(bomb);
    }
}

pub(super) async fn run(mut attacker: Attacker) {
    let methods = wire::methods(attacker.port.kind);
    for number in 0..REQUESTS_MAX {
        let method = methods[number % methods.len()];
        match number % 3 {
            0 => attacker.call(method, Some("gzip"), wire::message(true, &TENSORS)).await,
            1 => attacker.call(method, Some("gzip"), wire::message(true, &ZEROS)).await,
            _ if attacker.port.kind == PortKind::Client => {
                let path = wire::infer(&attacker.function);
                let more = [("content-encoding", "gzip")];
                let head = wire::post(&path, &more, NUMBERS.len(), &[]);
                attacker.request_in_parts(&[&head, &NUMBERS]).await;
            }
            _ => attacker.call(method, Some("deflate"), wire::message(true, &NUMBERS)).await,
        }
        tokio::time::sleep(EVERY).await;
    }
}
