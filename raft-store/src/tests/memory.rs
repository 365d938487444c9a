//! A file in memory that records the largest piece written or read.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::fs::FsFile;

#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    largest: AtomicUsize,
}

impl Memory {
    pub(crate) fn largest(&self) -> usize {
        self.largest.load(Ordering::Relaxed)
    }
}

impl From<Vec<u8>> for Memory {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, largest: AtomicUsize::new(0) }
    }
}

impl FsFile for Memory {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.largest.fetch_max(bytes.len(), Ordering::Relaxed);
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.largest.fetch_max(into.len(), Ordering::Relaxed);
        let rest = self.bytes.get(offset as usize..).unwrap_or_default();
        let len = rest.len().min(into.len());
        into[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}
