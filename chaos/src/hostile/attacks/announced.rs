//! Bodies and messages that are announced and never sent, but for a byte now and then. At a port for
//! clients four of them meet the byte budget exactly, over REST and over gRPC.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::hostile::PortKind;
use crate::hostile::attacker::{Attacker, DiscardingConnection};
use crate::hostile::wire::{self, flag, kind};

const MIB: usize = 1 << 20;
/// The largest message of a client, of which four are the budget of 1 GiB.
const MESSAGE_MAX: usize = 256 * MIB;
const MESSAGES: usize = 4;
/// The largest message between controllers.
const INTERNAL_MESSAGE_MAX: usize = 16 * MIB;
const INTERNAL_MESSAGES: usize = 16;
/// The wait between two bytes.
const BYTE_EVERY: Duration = Duration::from_secs(2);
const BYTES_MAX: usize = 1_000;
const CONNECTIONS_MAX: usize = 1_000;

pub(super) async fn run(mut attacker: Attacker) {
    let (count, length) = match attacker.port.kind {
        PortKind::Client | PortKind::Worker => (MESSAGES, MESSAGE_MAX),
        PortKind::Internal => (INTERNAL_MESSAGES, INTERNAL_MESSAGE_MAX),
    };
    let mut announcers = JoinSet::new();
    for number in 0..count {
        announcers.spawn(announce(Over::Grpc, number, length, attacker.another()));
        if attacker.port.kind == PortKind::Client {
            announcers.spawn(announce(Over::Rest, number, length, attacker.another()));
        }
    }
    announcers.join_all().await;
}

#[derive(Debug, Clone, Copy)]
enum Over {
    Rest,
    Grpc,
}

async fn announce(over: Over, number: usize, length: usize, mut attacker: Attacker) {
    let methods = wire::methods(attacker.port.kind);
    let begun = match over {
        // No such model has to be there.
        Over::Rest => wire::post(&wire::infer("nobody"), &[], length, b"{"),
        Over::Grpc => {
            let headers = wire::headers(&wire::grpc(methods[number % methods.len()]));
            let headers = wire::frame(kind::HEADERS, flag::END_HEADERS, 1, &headers);
            let prefix = wire::frame(kind::DATA, flag::NONE, 1, &wire::prefixed(false, length, &[]));
            [wire::opening(), headers, prefix].concat()
        }
    };
    let byte = match over {
        Over::Rest => vec![b' '],
        Over::Grpc => wire::frame(kind::DATA, flag::NONE, 1, &[0]),
    };
    for _ in 0..CONNECTIONS_MAX {
        if let Some(stream) = attacker.connect().await {
            let mut deaf = DiscardingConnection::to(stream, attacker.pace.clone());
            attacker.counts.sent(1);
            let mut goes_on = attacker.write(&mut deaf.write, &begun).await;
            for _ in 0..BYTES_MAX {
                tokio::select! {
                    () = deaf.closed() => goes_on = false,
                    () = tokio::time::sleep(BYTE_EVERY) => {}
                }
                if !goes_on {
                    attacker.counts.ended();
                    break;
                }
                goes_on = attacker.write(&mut deaf.write, &byte).await;
            }
        }
        tokio::time::sleep(BYTE_EVERY / 4).await;
    }
}
