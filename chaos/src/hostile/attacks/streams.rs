//! Tiny streams: cheap requests, many on each connection, over many connections. A run of the
//! scenario's own length makes about a million.

use std::time::Duration;

use crate::hostile::attacker::{Attacker, DiscardingConnection};
use crate::hostile::wire::{self, flag, kind};

/// Number of streams of each port per second.
const STREAMS_PER_SECOND: u32 = 2_500;
const BATCH: u32 = 50;
/// Number of streams of a connection.
const STREAMS_OF_A_CONNECTION: u32 = 500;
/// Maximum number of streams of each port in a turn.
const STREAMS_MAX: u32 = 500_000;

pub(super) async fn run(mut attacker: Attacker) {
    let headers = wire::tiny_request(attacker.port.kind);
    let mut beat = tokio::time::interval(Duration::from_secs(1) * BATCH / STREAMS_PER_SECOND);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for _ in 0..STREAMS_MAX / STREAMS_OF_A_CONNECTION {
        beat.tick().await;
        let Some(stream) = attacker.connect().await else { continue };
        let mut deaf = DiscardingConnection::to(stream, attacker.pace.clone());
        if !attacker.write(&mut deaf.write, &wire::opening()).await {
            attacker.counts.ended();
            continue;
        }
        for batch in 0..STREAMS_OF_A_CONNECTION / BATCH {
            beat.tick().await;
            let streams = (batch * BATCH..(batch + 1) * BATCH).map(|number| 2 * number + 1);
            let ends = flag::END_HEADERS | flag::END_STREAM;
            let frames = streams.flat_map(|id| wire::frame(kind::HEADERS, ends, id, &headers));
            attacker.counts.sent(BATCH.into());
            if !attacker.write(&mut deaf.write, &frames.collect::<Vec<_>>()).await {
                attacker.counts.ended();
                break;
            }
        }
        // Wait for the last answers before the connection is dropped.
        beat.tick().await;
    }
}
