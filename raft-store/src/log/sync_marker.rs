//! The sync marker: a small file beside sled's with the number of the last completed sync.
//!
//! At start, sled takes the first unreadable record for the end of its log and silently drops the
//! records behind it. That is right for a record that was being written at a power cut, and wrong
//! for a flipped bit in data that was durable long before. The store numbers its syncs, in sled
//! and, after each sync, in this file. If sled's number is lower than the marker's at start, the
//! store lost acknowledged data.
//!
//! The marker itself is not synced each time. It may therefore lag but never lead, so it is a lower
//! bound at no cost. Two slots are written in turn, so that a torn write leaves the other.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::frame;

const FORMAT: u8 = 1;
const KEY: &[u8] = b"millrace sync witness";
const SLOT_BYTES: usize = frame::ENVELOPE_BYTES + size_of::<u64>();
const SLOTS: u64 = 2;

pub(crate) struct SyncMarker {
    path: PathBuf,
    file: File,
}

impl SyncMarker {
    /// Opens or creates the marker. Returns it with the stored number, 0 if there is none.
    pub(crate) fn open(path: &Path) -> Result<(Self, u64), Error> {
        let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = open.map_err(Error::io("opening", path))?;
        let mut remembered = 0;
        for slot in 0..SLOTS {
            let number = read_slot(&file, slot).map_err(Error::io("reading", path))?;
            remembered = remembered.max(number.unwrap_or(0));
        }
        Ok((Self { path: path.to_owned(), file }, remembered))
    }

    /// Stores the number of a completed sync.
    pub(crate) fn store(&self, number: u64) -> Result<(), Error> {
        let offset = number % SLOTS * SLOT_BYTES as u64;
        let slot = frame::seal(FORMAT, KEY, &number.to_be_bytes());
        self.file.write_all_at(&slot, offset).map_err(Error::io("writing", &self.path))
    }
}

fn read_slot(file: &File, slot: u64) -> io::Result<Option<u64>> {
    let mut bytes = [0; SLOT_BYTES];
    match file.read_exact_at(&mut bytes, slot * SLOT_BYTES as u64) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    // A slot that cannot be read was being written at a power cut, or was never written: it bounds
    // nothing.
    let number = frame::unseal(FORMAT, KEY, &bytes).ok().and_then(|body| body.try_into().ok());
    Ok(number.map(u64::from_be_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_number_survives_a_torn_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("witness");
        let (witness, fresh) = SyncMarker::open(&path).unwrap();
        assert_eq!(fresh, 0);
        for number in 1..=5 {
            witness.store(number).unwrap();
            assert_eq!(SyncMarker::open(&path).unwrap().1, number);
        }
        // 6 overwrites 4 and is torn: 5 is still stored.
        witness.file.write_all_at(&[0xff; 4], 0).unwrap();
        assert_eq!(SyncMarker::open(&path).unwrap().1, 5);
    }
}
