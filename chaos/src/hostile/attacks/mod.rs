//! The attacks of hostile clients on a port, one module each. An attack runs until its turn is over
//! and then drops its connections. Every loop is bounded too.

mod announced;
mod foreign;
mod frames;
mod garbage;
mod gzip;
mod json;
mod protobuf;
mod readers;
mod resets;
mod shapes;
mod silent;
mod slow;
mod streams;

use super::attacker::Attacker;

/// The kind of an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Attack {
    /// Bodies and messages that are announced but never sent.
    Announced,
    /// Requests that a browser would send for another site.
    Foreign,
    /// Malformed HTTP/2 frames.
    Frames,
    /// Random bytes, TLS, and malformed requests in a pipeline.
    Garbage,
    /// Messages that are small until they are decompressed.
    Gzip,
    /// Giant and deep JSON.
    Json,
    /// Messages that are small until they are decoded.
    Protobuf,
    /// Clients that do not read their answers.
    Readers,
    /// Streams that are reset at once.
    Resets,
    /// Tensors whose shapes promise more elements than are sent.
    Shapes,
    /// Connections that send nothing.
    Silent,
    /// Clients that send a byte at a time.
    Slow,
    /// Tiny streams, many on each connection.
    Streams,
}

/// Does the attacks' preparatory work, which would otherwise spend the attackers' share.
pub(super) fn prepare() {
    gzip::prepare();
    json::prepare();
    protobuf::prepare();
}

impl Attack {
    pub(super) const ALL: [Self; 13] = [
        Self::Announced,
        Self::Foreign,
        Self::Frames,
        Self::Garbage,
        Self::Gzip,
        Self::Json,
        Self::Protobuf,
        Self::Readers,
        Self::Resets,
        Self::Shapes,
        Self::Silent,
        Self::Slow,
        Self::Streams,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Announced => "announced and never sent",
            Self::Foreign => "foreign hosts and origins",
            Self::Frames => "malformed HTTP/2",
            Self::Garbage => "rubbish",
            Self::Gzip => "gzip bombs",
            Self::Json => "JSON bombs",
            Self::Protobuf => "protobuf bombs",
            Self::Readers => "readers that read nothing",
            Self::Resets => "rapid resets",
            Self::Shapes => "huge shapes",
            Self::Silent => "silent connections",
            Self::Slow => "slow senders",
            Self::Streams => "tiny streams",
        }
    }

    /// Attacks a port.
    pub(super) async fn carry_out(self, attacker: Attacker) {
        match self {
            Self::Announced => announced::run(attacker).await,
            Self::Foreign => foreign::run(attacker).await,
            Self::Frames => frames::run(attacker).await,
            Self::Garbage => garbage::run(attacker).await,
            Self::Gzip => gzip::run(attacker).await,
            Self::Json => json::run(attacker).await,
            Self::Protobuf => protobuf::run(attacker).await,
            Self::Readers => readers::run(attacker).await,
            Self::Resets => resets::run(attacker).await,
            Self::Shapes => shapes::run(attacker).await,
            Self::Silent => silent::run(attacker).await,
            Self::Slow => slow::run(attacker).await,
            Self::Streams => streams::run(attacker).await,
        }
    }
}
