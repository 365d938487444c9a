//! A snapshot's bytes:
//!
//! ```text
//!   "MRSNAP\r\n"   8 bytes: also notices a transfer that mangled line ends
//!   format         u32, little endian
//!   meta length    u32
//!   state length   u64
//!   meta           openraft 0.9's SnapshotMeta in MessagePack with field names
//!   state          the machine's own encoding
//!   checksum       u32: CRC-32 of all before it
//! ```

use openraft::SnapshotMeta as OpenraftMeta;

use crate::config::SnapshotMeta;
use crate::error::Error;
use crate::frame::Flaw;

const MAGIC: [u8; 8] = *b"MRSNAP\r\n";

/// The format this build writes. It reads this one only.
///
/// | format | since | what |
/// |---|---|---|
/// | 1 | 0.1.0 | the first |
/// | 2 | 0.1.0 | a term has one leader, and positions in the log no longer name it |
const FORMAT: u32 = 2;

const HEADER_BYTES: usize = MAGIC.len() + 4 + 4 + 8;
const CHECKSUM_BYTES: usize = 4;

/// A snapshot's file as the parts to write one after another: header and meta, state, checksum.
pub(crate) struct Encoded {
    pub(crate) head: Vec<u8>,
    pub(crate) state: Vec<u8>,
    pub(crate) tail: [u8; CHECKSUM_BYTES],
}

pub(crate) fn encode(meta: &SnapshotMeta, state: Vec<u8>) -> Result<Encoded, Error> {
    let unencodable = |reason: String| Error::Encode { what: "a snapshot".to_owned(), reason };
    let meta = rmp_serde::to_vec_named(meta).map_err(|error| unencodable(error.to_string()))?;
    let meta_len = u32::try_from(meta.len()).map_err(|error| unencodable(error.to_string()))?;
    let mut head = MAGIC.to_vec();
    head.extend(FORMAT.to_le_bytes());
    head.extend(meta_len.to_le_bytes());
    head.extend((state.len() as u64).to_le_bytes());
    head.extend(meta);
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&head);
    checksum.update(&state);
    let tail = checksum.finalize().to_le_bytes();
    Ok(Encoded { head, state, tail })
}

/// Checks a snapshot's bytes and splits them into what it covers and the machine's state.
pub(crate) fn decode(bytes: &[u8]) -> Result<(SnapshotMeta, &[u8]), Flaw> {
    let damaged = |flaw: &str| Flaw::Damaged(flaw.to_owned());
    if !bytes.starts_with(&MAGIC) {
        return Err(damaged("it does not begin as a snapshot does"));
    }
    let Some((contents, checksum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else {
        return Err(damaged("it is cut short"));
    };
    let Some((header, body)) = contents.split_at_checked(HEADER_BYTES) else {
        return Err(damaged("it is cut short"));
    };
    if crc32fast::hash(contents) != u32::from_le_bytes(*checksum) {
        return Err(damaged("its checksum does not match, or it is cut short"));
    }
    let number = |at: usize, len: usize| {
        header[MAGIC.len()..][at..at + len]
            .iter()
            .rev()
            .fold(0_u64, |number, &byte| number << 8 | u64::from(byte))
    };
    let found = u32::try_from(number(0, 4)).unwrap_or(u32::MAX);
    if found != FORMAT {
        return Err(Flaw::UnknownFormat { found, known: FORMAT });
    }
    let lengths = usize::try_from(number(4, 4)).ok().zip(usize::try_from(number(8, 8)).ok());
    let split =
        lengths.and_then(|(meta, state)| body.split_at_checked(meta).filter(|(_, rest)| rest.len() == state));
    let Some((meta, state)) = split else { return Err(damaged("its lengths do not add up")) };
    let meta: OpenraftMeta<_, _> = rmp_serde::from_slice(meta)
        .map_err(|error| Flaw::Damaged(format!("what it covers does not decode: {error}")))?;
    Ok((meta, state))
}

#[cfg(test)]
mod tests {
    use openraft::CommittedLeaderId;

    use super::*;
    use crate::config::LogId;

    fn sample() -> (SnapshotMeta, Vec<u8>) {
        let meta = SnapshotMeta {
            last_log_id: Some(LogId::new(CommittedLeaderId::new(3, 1), 40)),
            snapshot_id: "3-1-40".to_owned(),
            ..Default::default()
        };
        let Encoded { head, state, tail } = encode(&meta, b"the state".to_vec()).unwrap();
        (meta, [&head[..], &state, &tail].concat())
    }

    #[test]
    fn what_was_encoded_comes_back() {
        let (meta, bytes) = sample();
        assert_eq!(decode(&bytes), Ok((meta, &b"the state"[..])));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let (_, bytes) = sample();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(decode(&flipped), Err(Flaw::Damaged(_))), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(matches!(decode(&bytes[..len]), Err(Flaw::Damaged(_))), "{len} bytes");
        }
    }

    #[test]
    fn another_format_is_told_from_damage() {
        let (_, mut bytes) = sample();
        bytes[MAGIC.len()] = 7;
        let end = bytes.len() - CHECKSUM_BYTES;
        let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
        bytes[end..].copy_from_slice(&checksum);
        assert_eq!(decode(&bytes), Err(Flaw::UnknownFormat { found: 7, known: 2 }));
    }
}
