//! The disk of a folder, which refuses bytes if too little space would stay free.

use std::io;
use std::path::{Path, PathBuf};

use millrace_types::Bytes;

use crate::error::{Error, io_error};
use crate::space::Space;

/// The disk of a directory.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    dir: PathBuf,
    /// The function that measures the space; tests replace it to simulate a full disk.
    look: fn(&Path) -> io::Result<Space>,
}

impl Disk {
    pub(crate) fn new(dir: PathBuf, look: fn(&Path) -> io::Result<Space>) -> Self {
        Self { dir, look }
    }

    /// Refuses `more` further bytes of a file of `bytes` if too little space would stay free.
    pub(crate) fn check_space(&self, bytes: Bytes, more: u64) -> Result<(), Error> {
        let space = (self.look)(&self.dir).map_err(io_error("cannot measure the space of", &self.dir))?;
        if space.takes(more) {
            return Ok(());
        }
        Err(Error::Full { dir: self.dir.clone(), space, bytes })
    }
}
