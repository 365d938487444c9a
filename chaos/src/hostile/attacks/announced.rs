//! Bodies and messages that are announced but never sent, except for a byte now and then. At a port
//! for clients, four of them use exactly the byte budget of inference, over REST and over gRPC, and
//! sixteen use that of the admin API.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::hostile::attacker::Attacker;
use crate::hostile::port::PortKind;
use crate::hostile::wire::{self, flag, kind};

const MIB: usize = 1 << 20;
/// The largest message of a client. Four of these are the budget of 1 GiB.
const MESSAGE_MAX: usize = 256 * MIB;
const MESSAGES: usize = 4;
/// The largest message to the admin API. Sixteen of these are its budget.
const ADMIN_MESSAGE_MAX: usize = 4 * MIB;
const ADMIN_MESSAGES: usize = 16;
/// The largest message between controllers.
const INTERNAL_MESSAGE_MAX: usize = 16 * MIB;
const INTERNAL_MESSAGES: usize = 16;
/// Interval between two bytes.
const BYTE_EVERY: Duration = Duration::from_secs(2);
/// Bytes of a connection after the beginning. A server ends the call after 5 s, and may keep the
/// connection.
const BYTES_MAX: usize = 3;
const CONNECTIONS_MAX: usize = 1_000;

pub(super) async fn run(mut attacker: Attacker) {
    let kind = attacker.port.kind;
    let mut announcers = JoinSet::new();
    let mut spawn = |over, count, length| {
        for _ in 0..count {
            announcers.spawn(announce(over, length, attacker.another()));
        }
    };
    match kind {
        PortKind::Client => {
            spawn(AnnouncedProtocol::Rest, MESSAGES, MESSAGE_MAX);
            spawn(
                AnnouncedProtocol::Grpc("/inference.GRPCInferenceService/ModelInfer"),
                MESSAGES / 2,
                MESSAGE_MAX,
            );
            let stream = "/inference.GRPCInferenceService/ModelStreamInfer";
            spawn(AnnouncedProtocol::Grpc(stream), MESSAGES / 2, MESSAGE_MAX);
            spawn(
                AnnouncedProtocol::Grpc("/millrace.admin.v1.Admin/ApplyFunction"),
                ADMIN_MESSAGES,
                ADMIN_MESSAGE_MAX,
            );
        }
        PortKind::Worker => {
            spawn(AnnouncedProtocol::Grpc("/millrace.worker.v1.Worker/Invoke"), MESSAGES, MESSAGE_MAX);
        }
        PortKind::Internal => {
            let append = "/millrace.raft.v1.Raft/AppendEntries";
            spawn(AnnouncedProtocol::Grpc(append), INTERNAL_MESSAGES, INTERNAL_MESSAGE_MAX);
        }
    }
    announcers.join_all().await;
}

#[derive(Debug, Clone, Copy)]
enum AnnouncedProtocol {
    Rest,
    /// A gRPC method.
    Grpc(&'static str),
}

async fn announce(over: AnnouncedProtocol, length: usize, mut attacker: Attacker) {
    let begun = match over {
        // The model need not exist.
        AnnouncedProtocol::Rest => wire::post(&wire::infer("nobody"), &[], length, b"{"),
        AnnouncedProtocol::Grpc(method) => {
            let headers = wire::headers(&wire::grpc(method));
            let headers = wire::frame(kind::HEADERS, flag::END_HEADERS, 1, &headers);
            let prefix = wire::frame(kind::DATA, flag::NONE, 1, &wire::prefixed(false, length, &[]));
            [wire::opening(), headers, prefix].concat()
        }
    };
    let byte = match over {
        AnnouncedProtocol::Rest => vec![b' '],
        AnnouncedProtocol::Grpc(_) => wire::frame(kind::DATA, flag::NONE, 1, &[0]),
    };
    for _ in 0..CONNECTIONS_MAX {
        if let Some(stream) = attacker.connect().await {
            let bytes = std::iter::repeat_n(byte.clone(), BYTES_MAX);
            attacker.send_slowly(stream, &begun, bytes, BYTE_EVERY).await;
        }
        tokio::time::sleep(BYTE_EVERY / 4).await;
    }
}
