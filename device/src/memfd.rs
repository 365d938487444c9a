//! Memory as files: creation, sealing, and access without a mapping.

use std::os::fd::{AsFd, OwnedFd};

use millrace_types::Bytes;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::error::Error;

/// Creates a memfd of `bytes` zero bytes, which uses no memory yet.
///
/// # Errors
/// [`Error::Os`], [`Error::OutOfMemory`].
pub fn create(name: &str, bytes: u64) -> Result<OwnedFd, Error> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags).map_err(Error::os("memfd_create"))?;
    rustix::fs::ftruncate(&file, bytes).map_err(Error::os("ftruncate"))?;
    Ok(file)
}

/// Seals the size, and also the contents if `seals` contains WRITE. Seals cannot be removed.
///
/// # Errors
/// [`Error::Os`].
pub fn seal(file: impl AsFd, seals: SealFlags) -> Result<(), Error> {
    let seals = seals | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(file, seals).map_err(Error::os("seal a memfd"))
}

/// Checks memory from another process: its size, and that its size cannot shrink under a mapping. If
/// `seals` contains WRITE, also checks that its contents cannot change.
///
/// # Errors
/// [`Error::Unsealed`], [`Error::Os`].
pub fn check_sealed(file: impl AsFd, bytes: u64, seals: SealFlags) -> Result<(), Error> {
    let found = size(&file)?;
    let due = seals | SealFlags::SHRINK;
    let has = rustix::fs::fcntl_get_seals(&file).map_err(Error::os("read a memfd's seals"))?;
    if found == bytes && has.contains(due) {
        return Ok(());
    }
    let written = seals.contains(SealFlags::WRITE);
    Err(Error::Unsealed { expected: Bytes(bytes), found: Bytes(found), written })
}

/// Returns the size of a file in bytes.
///
/// # Errors
/// [`Error::Os`].
pub fn size(file: impl AsFd) -> Result<u64, Error> {
    let stat = rustix::fs::fstat(file).map_err(Error::os("fstat"))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Writes all of `bytes` at `offset`. A system call is used and not a mapping: if the machine is out
/// of memory, the call returns an error, while a store to a mapping would cause SIGBUS.
///
/// # Errors
/// [`Error::Os`].
pub fn write_at(file: impl AsFd, mut bytes: &[u8], mut offset: u64) -> Result<(), Error> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(&file, bytes, offset));
        match written.map_err(Error::os("write to a memfd"))? {
            0 => return Err(Error::os("write to a memfd")(Errno::NOSPC)),
            count => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
        }
    }
    Ok(())
}

/// Fills `bytes` from the file's contents at `offset`.
///
/// # Errors
/// [`Error::Os`].
pub fn read_at(file: impl AsFd, mut bytes: &mut [u8], mut offset: u64) -> Result<(), Error> {
    while !bytes.is_empty() {
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(&file, &mut *bytes, offset));
        match read.map_err(Error::os("read a memfd"))? {
            0 => return Err(Error::os("read a memfd past its end")(Errno::INVAL)),
            count => {
                bytes = &mut bytes[count..];
                offset += count as u64;
            }
        }
    }
    Ok(())
}
