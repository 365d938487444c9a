//! The readers of the data directory's bytes and of other controllers', for the fuzz targets of `fuzz/`.
//! Built for them alone.

use std::io::{self, Read as _};
use std::path::Path;

use millrace_cluster_state::{State, packed};
use openraft::raft::{AppendEntriesRequest, VoteRequest};

use crate::fs::FsFile;
use crate::log::record::{self, Records};
use crate::snapshot::format;
use crate::{ClusterConfig, Entry, RaftId};

/// A file in memory.
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

/// Pairs of the log's store, each key and value behind its length as 4 big-endian bytes, as they are; and
/// the bytes as one entry, whose checksum is right.
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
        assert_eq!(read(pairs), 1, "an entry that is intact comes back");
    }
}

/// The number of entries that were intact.
fn read(pairs: impl Iterator<Item = Result<(sled::IVec, sled::IVec), sled::Error>>) -> usize {
    let records = Records::new(pairs, Path::new("log").into());
    let intact = records.map_while(Result::ok);
    intact.map(|(_, body)| drop(packed::from_slice::<Entry<State>>(&body))).count()
}

/// A snapshot's file, as it is and with the checksum of its bytes behind them.
pub fn snapshot(data: &[u8]) {
    let sealed = [data, &crc32fast::hash(data).to_le_bytes()].concat();
    for file in [File(data), File(&sealed)] {
        if let Ok(Ok(checked)) = format::check(&file) {
            drop(State::read_from(&mut checked.state(&file)));
        }
    }
}

/// The payload of another controller's message.
pub fn raft_message(data: &[u8]) {
    drop(packed::from_slice::<AppendEntriesRequest<ClusterConfig>>(data));
    drop(packed::from_slice::<VoteRequest<RaftId>>(data));
}
