//! Entry points for the fuzz targets in `fuzz/`: the parsers of the data directory's bytes and of
//! other controllers' messages. Built only for fuzzing.

use std::io::{self, Read as _};
use std::path::Path;

use millrace_cluster_state::{State, packed};
use openraft::raft::{AppendEntriesRequest, VoteRequest};

use crate::fs::FsFile;
use crate::log::record::{self, EntryRecords};
use crate::snapshot::format;
use crate::{ClusterConfig, Entry, RaftId};

struct File<'a>(&'a [u8]);

impl FsFile for File<'_> {
    fn append(&mut self, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        let mut rest = &self.0[from..];
        rest.read(into)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Parses the input in two ways: as pairs of the log's store, with each key and value behind its
/// length as 4 big-endian bytes; and as the body of an entry with a correct checksum.
pub fn log_records(data: &[u8]) {
    let mut rest = data;
    let mut next = || {
        let (len, behind) = rest.split_first_chunk::<4>()?;
        let (bytes, behind) = behind.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        rest = behind;
        Some(sled::IVec::from(bytes))
    };
    let pairs = std::iter::from_fn(|| Some(Ok((next()?, next()?))));
    read(pairs);
    if let Ok(pairs) = record::encode(7, data) {
        let pairs = pairs.iter().map(|(key, value)| Ok((key.as_slice().into(), value.as_slice().into())));
        assert_eq!(read(pairs), 1, "an intact entry is read back");
    }
}

/// Returns the number of intact entries.
fn read(pairs: impl Iterator<Item = Result<(sled::IVec, sled::IVec), sled::Error>>) -> usize {
    let records = EntryRecords::new(pairs, Path::new("log").into());
    let intact = records.map_while(Result::ok);
    intact.map(|(_, body)| drop(packed::from_slice::<Entry<State>>(&body))).count()
}

/// Parses the input as a snapshot file, once unchanged and once followed by its own checksum.
pub fn snapshot(data: &[u8]) {
    let sealed = [data, &crc32fast::hash(data).to_le_bytes()].concat();
    for file in [File(data), File(&sealed)] {
        if let Ok(Ok(checked)) = format::check(&file) {
            drop(State::read_from(&mut checked.state(&file)));
        }
    }
}

/// Parses the input as the payload of another controller's message.
pub fn raft_message(data: &[u8]) {
    drop(packed::from_slice::<AppendEntriesRequest<ClusterConfig>>(data));
    drop(packed::from_slice::<VoteRequest<RaftId>>(data));
}
