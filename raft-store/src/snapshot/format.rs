//! The bytes of a snapshot:
//!
//! ```text
//!   "MRSNAP\r\n"   8 bytes: also detects a transfer that changed line ends
//!   format         u32, little endian
//!   meta length    u32
//!   state length   u64
//!   meta           openraft 0.9's SnapshotMeta in MessagePack with field names
//!   state          the machine's own encoding
//!   checksum       u32: CRC-32 of all preceding bytes
//! ```

use std::io::{self, BufReader, Read, Write};
use std::ops::Range;

use millrace_cluster_state::packed;
use openraft::SnapshotMeta as OpenraftMeta;

use crate::error::Error;
use crate::frame::RecordFault;
use crate::fs::FsFile;
use crate::raft_ids::SnapshotMeta;

const MAGIC: [u8; 8] = *b"MRSNAP\r\n";

/// The format that this build writes, and the only format that it reads.
///
/// | format | since | content |
/// |---|---|---|
/// | 1 | 0.1.0 | the first format |
/// | 2 | 0.1.0 | a term has a single leader, so positions in the log have no leader |
const FORMAT: u32 = 2;

const HEADER_BYTES: usize = MAGIC.len() + 4 + 4 + 8;
const CHECKSUM_BYTES: usize = 4;
/// Maximum size of the encoded meta, in bytes: a position in the log and the members, some hundred
/// bytes each. The decoded meta is larger.
const META_BYTES_MAX: u64 = 64 << 10;

/// Maximum number of bytes of a snapshot in memory while it is written or read.
pub(crate) const BUFFER_BYTES: usize = 1 << 20;

/// A function that writes a machine's own encoding, with the same bytes on each call.
pub(crate) type WriteState<'a> = dyn Fn(&mut dyn Write) -> io::Result<()> + 'a;

/// A snapshot to be written. Its state is encoded during the write, and never in memory as a whole.
pub(crate) struct SnapshotEncoder<'a> {
    head: Vec<u8>,
    state: &'a WriteState<'a>,
}

impl<'a> SnapshotEncoder<'a> {
    /// Encodes the state once to find its length, which precedes the state in the file.
    ///
    /// # Errors
    /// [`Error::Encode`].
    pub(crate) fn of(meta: &SnapshotMeta, state: &'a WriteState<'a>) -> Result<Self, Error> {
        let unencodable = |reason: String| Error::Encode { what: "a snapshot".to_owned(), reason };
        let mut counted = Counted(0);
        state(&mut counted).map_err(|error| unencodable(error.to_string()))?;
        let meta = rmp_serde::to_vec_named(meta).map_err(|error| unencodable(error.to_string()))?;
        let meta_len = u32::try_from(meta.len()).map_err(|error| unencodable(error.to_string()))?;
        if u64::from(meta_len) > META_BYTES_MAX {
            return Err(unencodable(format!("its meta has {meta_len} bytes, more than {META_BYTES_MAX}")));
        }
        let mut head = MAGIC.to_vec();
        head.extend(FORMAT.to_le_bytes());
        head.extend(meta_len.to_le_bytes());
        head.extend(counted.0.to_le_bytes());
        head.extend(meta);
        Ok(Self { head, state })
    }

    /// Writes the whole file.
    ///
    /// # Errors
    /// The error of the file system.
    pub(crate) fn write_to(&self, file: &mut dyn FsFile) -> io::Result<()> {
        let mut out = ChecksumWriter::new(file);
        let written = out.write_all(&self.head).and_then(|()| (self.state)(&mut out));
        // The encoder wraps the file's error, but callers detect a full disk by the system's own
        // error.
        written.map_err(|error| out.failed.take().unwrap_or(error))?;
        out.finish()
    }
}

struct Counted(u64);

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Buffers small pieces for a file, and computes their checksum.
struct ChecksumWriter<'a> {
    file: &'a mut dyn FsFile,
    waiting: Vec<u8>,
    checksum: crc32fast::Hasher,
    failed: Option<io::Error>,
}

impl<'a> ChecksumWriter<'a> {
    fn new(file: &'a mut dyn FsFile) -> Self {
        let waiting = Vec::with_capacity(BUFFER_BYTES);
        Self { file, waiting, checksum: crc32fast::Hasher::new(), failed: None }
    }

    fn write_waiting(&mut self) -> io::Result<()> {
        self.file.append(&self.waiting)?;
        self.checksum.update(&self.waiting);
        self.waiting.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        self.write_waiting()?;
        self.file.append(&self.checksum.finalize().to_le_bytes())
    }
}

impl Write for ChecksumWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.waiting.len() == BUFFER_BYTES
            && let Err(error) = self.write_waiting()
        {
            let kind = error.kind();
            self.failed = Some(error);
            return Err(kind.into());
        }
        let taken = bytes.len().min(BUFFER_BYTES - self.waiting.len());
        self.waiting.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The result of checking a snapshot's file: its metadata, and the position of the machine's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotLayout {
    pub(crate) meta: SnapshotMeta,
    state: Range<u64>,
}

impl SnapshotLayout {
    /// Returns a reader of the machine's state, which reads in pieces.
    pub(crate) fn state<'a>(&self, file: &'a dyn FsFile) -> impl Read + use<'a> {
        BufReader::with_capacity(BUFFER_BYTES, FileRange { file, rest: self.state.clone() })
    }
}

/// A range of a file.
struct FileRange<'a> {
    file: &'a dyn FsFile,
    rest: Range<u64>,
}

impl Read for FileRange<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.rest.end - self.rest.start).unwrap_or(usize::MAX);
        let len = into.len().min(left).min(BUFFER_BYTES);
        let read = self.file.read_at(self.rest.start, &mut into[..len])?;
        self.rest.start += read as u64;
        Ok(read)
    }
}

/// Reads a snapshot's file once, in pieces, and checks it.
///
/// # Errors
/// The outer error is that of the file system; the inner error is the fault of the file.
pub(crate) fn check(file: &dyn FsFile) -> io::Result<Result<SnapshotLayout, RecordFault>> {
    let damaged = |flaw: &str| Ok(Err(RecordFault::Damaged(flaw.to_owned())));
    let size = file.size()?;
    let mut header = [0; HEADER_BYTES];
    let header_read = read_up_to(file, 0, &mut header)?;
    if !header[..header_read].starts_with(&MAGIC) {
        return damaged("it does not begin like a snapshot");
    }
    let Some(contents) = size.checked_sub(CHECKSUM_BYTES as u64).filter(|len| *len >= HEADER_BYTES as u64)
    else {
        return damaged("it is cut short");
    };
    let mut expected = [0; CHECKSUM_BYTES];
    read_up_to(file, contents, &mut expected)?;
    if checksum(file, contents)? != u32::from_le_bytes(expected) {
        return damaged("its checksum does not match, or it is cut short");
    }
    let number = |at: usize, len: usize| {
        header[MAGIC.len()..][at..at + len]
            .iter()
            .rev()
            .fold(0_u64, |number, &byte| number << 8 | u64::from(byte))
    };
    let found = u32::try_from(number(0, 4)).unwrap_or(u32::MAX);
    if found != FORMAT {
        return Ok(Err(RecordFault::UnknownFormat { found, known: FORMAT }));
    }
    let meta_len = number(4, 4);
    let state_len = number(8, 8);
    let state_from = HEADER_BYTES as u64 + meta_len;
    if state_from.checked_add(state_len) != Some(contents) {
        return damaged("its lengths do not add up");
    }
    if meta_len > META_BYTES_MAX {
        return damaged("its meta is too long");
    }
    let meta = FileRange { file, rest: HEADER_BYTES as u64..state_from };
    match packed::from_read::<OpenraftMeta<_, _>>(BufReader::new(meta)) {
        Ok(meta) => Ok(Ok(SnapshotLayout { meta, state: state_from..contents })),
        Err(error) => Ok(Err(RecordFault::Damaged(format!("its meta does not decode: {error}")))),
    }
}

fn checksum(file: &dyn FsFile, len: u64) -> io::Result<u32> {
    let mut rest = FileRange { file, rest: 0..len };
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut checksum = crc32fast::Hasher::new();
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(checksum.finalize()),
            read => checksum.update(&buffer[..read]),
        }
    }
}

/// Fills a buffer from an offset of a file, as far as the file reaches. Returns the number of
/// bytes.
fn read_up_to(file: &dyn FsFile, from: u64, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match file.read_at(from + filled as u64, &mut into[filled..])? {
            0 => break,
            more => filled += more,
        }
    }
    Ok(filled)
}

/// Copies a snapshot's file in pieces.
///
/// # Errors
/// The error of the file system.
pub(crate) fn copy(from: &dyn FsFile, to: &mut dyn FsFile) -> io::Result<()> {
    let mut rest = FileRange { file: from, rest: 0..from.size()? };
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(()),
            read => to.append(&buffer[..read])?,
        }
    }
}

#[cfg(test)]
mod tests {
    use openraft::CommittedLeaderId;

    use super::*;
    use crate::raft_ids::LogId;
    use crate::tests::memory::Memory;

    fn meta() -> SnapshotMeta {
        SnapshotMeta {
            last_log_id: Some(LogId::new(CommittedLeaderId::new(3, 1), 40)),
            snapshot_id: "3-1-40".to_owned(),
            ..Default::default()
        }
    }

    fn written(state: &WriteState<'_>) -> Memory {
        let mut file = Memory::default();
        SnapshotEncoder::of(&meta(), state).unwrap().write_to(&mut file).unwrap();
        file
    }

    fn sample() -> Vec<u8> {
        written(&|out| out.write_all(b"the state")).bytes
    }

    fn checked(bytes: &[u8]) -> Result<SnapshotLayout, RecordFault> {
        check(&Memory::from(bytes.to_vec())).unwrap()
    }

    fn state_of(file: &Memory) -> Vec<u8> {
        let mut state = Vec::new();
        check(file).unwrap().unwrap().state(file).read_to_end(&mut state).unwrap();
        state
    }

    #[test]
    fn an_encoded_snapshot_is_read_back_unchanged() {
        let file = written(&|out| out.write_all(b"the state"));
        assert_eq!(check(&file).unwrap().unwrap().meta, meta());
        assert_eq!(state_of(&file), b"the state");
    }

    #[test]
    fn a_large_state_is_written_and_read_in_bounded_pieces() {
        let write =
            |out: &mut dyn Write| (0..3_000_000_u32).try_for_each(|n| out.write_all(&n.to_le_bytes()));
        let file = written(&write);
        let expected: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        assert!(state_of(&file) == expected);
        let mut copied = Memory::default();
        copy(&file, &mut copied).unwrap();
        assert!(copied.bytes == file.bytes);
        for file in [file, copied] {
            assert!(file.largest() <= BUFFER_BYTES, "a piece of {} bytes", file.largest());
        }
    }

    #[test]
    fn a_full_disk_is_reported_by_the_systems_own_error() {
        struct Full;
        impl FsFile for Full {
            fn append(&mut self, _: &[u8]) -> io::Result<()> {
                Err(io::Error::from_raw_os_error(28))
            }
            fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<usize> {
                Ok(0)
            }
            fn size(&self) -> io::Result<u64> {
                Ok(0)
            }
            fn sync(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let wrap = |error: io::Error| io::Error::other(error.to_string());
        let large = |out: &mut dyn Write| out.write_all(&[0; 3 * BUFFER_BYTES]).map_err(wrap);
        let small = |out: &mut dyn Write| out.write_all(b"state").map_err(wrap);
        for state in [&large as &WriteState<'_>, &small] {
            let error = SnapshotEncoder::of(&meta(), state).unwrap().write_to(&mut Full).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(28), "{error}");
        }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_detected() {
        let bytes = sample();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(checked(&flipped), Err(RecordFault::Damaged(_))), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(matches!(checked(&bytes[..len]), Err(RecordFault::Damaged(_))), "{len} bytes");
        }
    }

    #[test]
    fn another_format_is_distinguished_from_damage() {
        let mut bytes = sample();
        bytes[MAGIC.len()] = 7;
        let end = bytes.len() - CHECKSUM_BYTES;
        let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
        bytes[end..].copy_from_slice(&checksum);
        assert_eq!(checked(&bytes), Err(RecordFault::UnknownFormat { found: 7, known: 2 }));
    }
}
