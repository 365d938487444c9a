//! Malformed HTTP/2: wrong lengths, unknown settings, window updates of zero or beyond the maximum,
//! endless header blocks, frames on wrong streams, and HPACK bombs.

use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;

use crate::hostile::attacker::{Attacker, DiscardingConnection};
use crate::hostile::port::PortKind;
use crate::hostile::wire::{self, flag, frame, frame_of_length, kind};

const EVERY: Duration = Duration::from_millis(100);
const CONNECTIONS_MAX: usize = 10_000;
/// Maximum wait for the server to close a connection.
const PATIENCE: Duration = Duration::from_millis(200);
/// Number of frames in a flood.
const FLOOD: usize = 1_000;
/// Payload bytes of each frame of a flood that has a payload.
const FLOOD_FRAME: usize = 1 << 10;
/// Basis for the number of references to a large header.
const REFERENCES: usize = 16_000;

#[derive(Debug, Clone, Copy)]
enum Malformed {
    RandomFrames,
    LengthBeyondTheLimit,
    SettingsOfFiveBytes,
    UnknownSettings,
    SettingsFlood,
    PingFlood,
    WindowUpdateOfNothing,
    WindowTooFar,
    ContinuationFlood,
    ContinuationOfNothing,
    DataOnNoStream,
    HeadersOnAnEvenStream,
    PriorityOnItself,
    PushFromAClient,
    EmptyDataFlood,
    HpackBomb,
    HpackRubbish,
    GoneAndGoesOn,
}

const ALL: [Malformed; 18] = [
    Malformed::RandomFrames,
    Malformed::LengthBeyondTheLimit,
    Malformed::SettingsOfFiveBytes,
    Malformed::UnknownSettings,
    Malformed::SettingsFlood,
    Malformed::PingFlood,
    Malformed::WindowUpdateOfNothing,
    Malformed::WindowTooFar,
    Malformed::ContinuationFlood,
    Malformed::ContinuationOfNothing,
    Malformed::DataOnNoStream,
    Malformed::HeadersOnAnEvenStream,
    Malformed::PriorityOnItself,
    Malformed::PushFromAClient,
    Malformed::EmptyDataFlood,
    Malformed::HpackBomb,
    Malformed::HpackRubbish,
    Malformed::GoneAndGoesOn,
];

pub(super) async fn run(mut attacker: Attacker) {
    for _ in 0..CONNECTIONS_MAX {
        tokio::time::sleep(EVERY).await;
        let Some(stream) = attacker.connect().await else { continue };
        let malformed = ALL[attacker.rng.random_range(0..ALL.len())];
        let bytes = [wire::opening(), malformed.bytes(attacker.port.kind, &mut attacker.rng)].concat();
        let mut deaf = DiscardingConnection::to(stream, attacker.pace.clone());
        attacker.counts.sent(1);
        attacker.write(&mut deaf.write, &bytes).await;
        if tokio::time::timeout(PATIENCE, deaf.closed()).await.is_ok() {
            attacker.counts.ended();
        }
    }
}

impl Malformed {
    /// Returns all bytes after the preface.
    fn bytes(self, port: PortKind, rng: &mut StdRng) -> Vec<u8> {
        let call = wire::headers(&wire::grpc(wire::methods(port)[0]));
        let begun = || frame(kind::HEADERS, flag::END_HEADERS, 1, &call);
        match self {
            Self::RandomFrames => (0..20).flat_map(|_| random_frame(rng)).collect(),
            Self::LengthBeyondTheLimit => frame_of_length((1 << 24) - 1, kind::DATA, flag::NONE, 1, &[0; 64]),
            Self::SettingsOfFiveBytes => frame(kind::SETTINGS, flag::NONE, 0, &[0; 5]),
            Self::UnknownSettings => {
                let settings: Vec<u8> =
                    (0x10..0x800).flat_map(|id| wire::setting(id, rng.random())).collect();
                frame(kind::SETTINGS, flag::NONE, 0, &settings)
            }
            Self::SettingsFlood => frame(kind::SETTINGS, flag::NONE, 0, &wire::setting(3, 1)).repeat(FLOOD),
            Self::PingFlood => frame(kind::PING, flag::NONE, 0, &[7; 8]).repeat(FLOOD),
            Self::WindowUpdateOfNothing => {
                let on_both = [0, 1].map(|id| frame(kind::WINDOW_UPDATE, flag::NONE, id, &[0; 4]));
                [begun(), on_both.concat()].concat()
            }
            Self::WindowTooFar => {
                frame(kind::WINDOW_UPDATE, flag::NONE, 0, &[0x7f, 0xff, 0xff, 0xff]).repeat(4)
            }
            Self::ContinuationFlood => {
                let first = frame(kind::HEADERS, flag::NONE, 1, &call);
                let more = wire::headers(&[("x-more", &"x".repeat(FLOOD_FRAME))]);
                [first, frame(kind::CONTINUATION, flag::NONE, 1, &more).repeat(FLOOD)].concat()
            }
            Self::ContinuationOfNothing => frame(kind::CONTINUATION, flag::END_HEADERS, 1, &call),
            Self::DataOnNoStream => frame(kind::DATA, flag::NONE, 0, &[0; 64]),
            Self::HeadersOnAnEvenStream => frame(kind::HEADERS, flag::END_HEADERS, 2, &call),
            Self::PriorityOnItself => frame(kind::PRIORITY, flag::NONE, 1, &[0, 0, 0, 1, 16]),
            Self::PushFromAClient => {
                [begun(), frame(kind::PUSH_PROMISE, flag::END_HEADERS, 1, &call)].concat()
            }
            Self::EmptyDataFlood => [begun(), frame(kind::DATA, flag::NONE, 1, &[]).repeat(FLOOD)].concat(),
            Self::HpackBomb => {
                // The header is stored under the first free index, 62, and each further byte refers
                // to it.
                let large = wire::headers(&[("x-large", &"x".repeat(3_500))]);
                let stored = [&[0x40], &large[1..]].concat();
                let block = [call.clone(), stored, vec![0x80 | 62; REFERENCES - 4_000]].concat();
                frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &block)
            }
            Self::HpackRubbish => {
                let block: Vec<u8> = (0..256).map(|_| rng.random()).collect();
                frame(kind::HEADERS, flag::END_HEADERS, 1, &block)
            }
            Self::GoneAndGoesOn => {
                let gone = frame(kind::GOAWAY, flag::NONE, 0, &[0; 8]);
                [gone, begun(), frame(kind::DATA, flag::NONE, 1, &[0; 64])].concat()
            }
        }
    }
}

/// Returns a frame of any type, on any stream, with a length that may be wrong.
fn random_frame(rng: &mut StdRng) -> Vec<u8> {
    let payload: Vec<u8> = (0..rng.random_range(0..64)).map(|_| rng.random()).collect();
    let length = if rng.random() { payload.len() } else { rng.random_range(0..1 << 14) };
    frame_of_length(length, rng.random_range(0..12), rng.random(), rng.random_range(0..8), &payload)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn every_malformed_message_is_bounded_and_depends_on_the_seed_alone() {
        for malformed in ALL {
            let of = |seed| malformed.bytes(PortKind::Client, &mut StdRng::seed_from_u64(seed));
            assert_eq!(of(1), of(1), "{malformed:?}");
            assert!((9..2 << 20).contains(&of(1).len()), "{malformed:?}: {}", of(1).len());
        }
    }
}
