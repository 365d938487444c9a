//! Encodings of the protocols, well-formed and malformed: HTTP/1 requests, HTTP/2 frames, protobuf
//! fields, gRPC messages, gzip. Pure.

use std::io::Write as _;

use bytes::{Bytes, BytesMut};
use flate2::Compression;
use flate2::write::GzEncoder;

use super::port::PortKind;

/// A host name that every server accepts. A foreign name would be refused before any other check.
pub(super) const AUTHORITY: &str = "127.0.0.1";
/// The first bytes of an HTTP/2 client.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The largest frame that a server has to accept by default, in bytes.
pub(super) const FRAME_MAX: usize = 16 << 10;

/// Types of HTTP/2 frames.
pub(super) mod kind {
    pub(crate) const DATA: u8 = 0;
    pub(crate) const HEADERS: u8 = 1;
    pub(crate) const PRIORITY: u8 = 2;
    pub(crate) const RST_STREAM: u8 = 3;
    pub(crate) const SETTINGS: u8 = 4;
    pub(crate) const PUSH_PROMISE: u8 = 5;
    pub(crate) const PING: u8 = 6;
    pub(crate) const GOAWAY: u8 = 7;
    pub(crate) const WINDOW_UPDATE: u8 = 8;
    pub(crate) const CONTINUATION: u8 = 9;
}

/// Flags of HTTP/2 frames.
pub(super) mod flag {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const END_STREAM: u8 = 1;
    pub(crate) const END_HEADERS: u8 = 4;
}

/// Returns an HTTP/2 frame with the length of its payload.
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    frame_of_length(payload.len(), kind, flags, stream, payload)
}

/// Returns an HTTP/2 frame that claims this length.
pub(super) fn frame_of_length(length: usize, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Returns the preface and empty settings, which start an HTTP/2 connection.
pub(super) fn opening() -> Vec<u8> {
    [PREFACE, &frame(kind::SETTINGS, flag::NONE, 0, &[])].concat()
}

/// Returns a setting of a SETTINGS frame.
pub(super) fn setting(id: u16, value: u32) -> Vec<u8> {
    [&id.to_be_bytes()[..], &value.to_be_bytes()[..]].concat()
}

/// Returns a header list in HPACK without any state: literals that are not indexed.
pub(super) fn headers(list: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in list {
        block.push(0);
        for text in [name, value] {
            integer(&mut block, text.len());
            block.extend(text.as_bytes());
        }
    }
    block
}

/// Appends an HPACK integer with a prefix of seven bits. The flag for Huffman coding is 0.
fn integer(block: &mut Vec<u8>, value: usize) {
    if value < 127 {
        block.extend(u8::try_from(value));
        return;
    }
    block.push(127);
    block.extend(varint((value - 127) as u64));
}

/// Returns the headers of a request that the port answers cheaply.
pub(super) fn tiny_request(kind: PortKind) -> Vec<u8> {
    match kind {
        PortKind::Client => headers(&get("/v2/health/live")),
        PortKind::Internal | PortKind::Worker => headers(&grpc("/grpc.health.v1.Health/Check")),
    }
}

/// Returns the headers of a GET.
pub(super) fn get(path: &str) -> [(&str, &str); 4] {
    [(":method", "GET"), (":scheme", "http"), (":authority", AUTHORITY), (":path", path)]
}

/// Returns the headers of a gRPC call.
pub(super) fn grpc(path: &str) -> [(&str, &str); 6] {
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", AUTHORITY),
        (":path", path),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
}

/// Returns an HTTP/1 request that announces `length` bytes of body. `body` may be a part of these
/// bytes.
pub(super) fn post(path: &str, more: &[(&str, &str)], length: usize, body: &[u8]) -> Vec<u8> {
    let mut request = format!("POST {path} HTTP/1.1\r\nhost: {AUTHORITY}\r\ncontent-length: {length}\r\n");
    request += "content-type: application/json\r\n";
    for (name, value) in more {
        request += &format!("{name}: {value}\r\n");
    }
    request += "\r\n";
    [request.as_bytes(), body].concat()
}

/// Returns the path of an inference.
pub(super) fn infer(function: &str) -> String {
    format!("/v2/models/{function}/infer")
}

/// Returns a gRPC message: its prefix of five bytes, and its bytes.
pub(super) fn message(compressed: bool, bytes: &[u8]) -> Bytes {
    prefixed(compressed, bytes.len(), bytes)
}

/// Returns the beginning of a gRPC message that announces `length` bytes.
pub(super) fn prefixed(compressed: bool, length: usize, bytes: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(5 + bytes.len());
    message.extend([u8::from(compressed)]);
    message.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    message.extend(bytes);
    message.freeze()
}

/// Returns a protobuf field of bytes.
pub(super) fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
    let mut field = varint(u64::from(number << 3 | 2));
    field.extend(varint(bytes.len() as u64));
    field.extend(bytes);
    field
}

/// Returns a base-128 number, as in protobuf and HPACK.
pub(super) fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

/// Returns compressed data: `beginning`, then `pattern` repeated up to `length` bytes.
pub(super) fn gzip(beginning: &[u8], pattern: &[u8], length: usize) -> Vec<u8> {
    const CHUNK: usize = 64 << 10;
    let chunk = pattern.repeat(CHUNK / pattern.len());
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(beginning).expect("memory takes all bytes");
    for _ in 0..length / chunk.len() {
        gzip.write_all(&chunk).expect("memory takes all bytes");
    }
    gzip.finish().expect("memory takes all bytes")
}

/// Returns the methods of a port that accept a message. The attacks send these methods no message
/// that a server would obey.
pub(super) fn methods(kind: PortKind) -> &'static [&'static str] {
    match kind {
        PortKind::Client => &[
            "/inference.GRPCInferenceService/ModelInfer",
            "/inference.GRPCInferenceService/ModelStreamInfer",
            "/millrace.admin.v1.Admin/ApplyFunction",
            "/millrace.admin.v1.Admin/UploadArtifact",
        ],
        PortKind::Internal => &[
            "/millrace.raft.v1.Raft/Propose",
            "/millrace.raft.v1.Raft/AppendEntries",
            "/millrace.raft.v1.Raft/Snapshot",
            "/millrace.worker.v1.WorkerControl/Attach",
        ],
        PortKind::Worker => &[
            "/millrace.worker.v1.Worker/Invoke",
            "/millrace.worker.v1.Worker/ReleaseObjects",
            "/millrace.worker.v1.WorkerObjects/FetchObject",
        ],
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn frames_have_nine_bytes_before_their_payload() {
        assert_eq!(frame(kind::PING, flag::NONE, 0, &[7; 8])[..9], [0, 0, 8, 6, 0, 0, 0, 0, 0]);
        assert_eq!(
            frame_of_length(1 << 20, kind::DATA, flag::END_STREAM, 3, &[]),
            [16, 0, 0, 0, 1, 0, 0, 0, 3]
        );
        assert_eq!(setting(4, 0), [0, 4, 0, 0, 0, 0]);
    }

    #[test]
    fn headers_are_encoded_as_literals_of_any_length() {
        assert_eq!(headers(&[("a", "bc")]), [0, 1, b'a', 2, b'b', b'c']);
        let long = "x".repeat(300);
        assert_eq!(headers(&[("a", &long)])[..6], [0, 1, b'a', 127, 173, 1]);
    }

    #[test]
    fn a_message_begins_with_its_length() {
        assert_eq!(&message(false, &field(5, &[]))[..], [0, 0, 0, 0, 2, 0x2a, 0]);
        assert_eq!(varint(300), [0xac, 2]);
        assert_eq!(&prefixed(true, 256 << 20, &[])[..], [1, 16, 0, 0, 0]);
    }

    #[test]
    fn a_gzip_bomb_is_small_until_it_is_decompressed() {
        let bomb = gzip(&[], b"0,", 1 << 20);
        assert!(bomb.len() < 16 << 10, "{}", bomb.len());
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&bomb[..]).read_to_end(&mut plain).unwrap();
        assert_eq!((plain.len(), &plain[..4]), (1 << 20, &b"0,0,"[..]));
    }
}
