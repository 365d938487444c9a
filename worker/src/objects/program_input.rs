//! Data in the form that programs read: small data in a message, large data in memory. Several
//! processes map the same memory. Seals ensure that neither its writer nor a reader can change or
//! resize the memory. A program may pass sealed memory on as an output.

use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};

use super::store::PIECE;
use super::{Contents, INLINE_BYTES_MAX, memory, size_of_memory};
use crate::port::Descriptor;

/// Largest data that is copied and sealed on the calling thread, in bytes: data that would travel
/// in a message.
const AT_ONCE_MAX: u64 = INLINE_BYTES_MAX as u64;
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::GROW).union(SealFlags::SHRINK);

/// An input or fetched object as a program gets it.
#[derive(Debug)]
pub(crate) enum ProgramInput {
    Inline(Bytes),
    /// Sealed memory of exactly the data's size.
    Memory(Descriptor),
}

impl Contents {
    /// Whether [`Self::given`] needs neither a large copy nor an inspection of large memory.
    pub(crate) fn is_given_at_once(&self, offset: u64, bytes: u64) -> bool {
        let lies_there = || match self {
            Self::Memory { fd, bytes: all } => (offset, bytes) == (0, *all) && is_sealed(fd),
            Self::Inline(_) | Self::Kept(_) => false,
        };
        bytes <= AT_ONCE_MAX || lies_there()
    }

    /// Converts a range of bytes on the host for a program. Blocks for a copy, or while the kernel
    /// checks whether a process has the memory mapped for writing.
    ///
    /// # Errors
    /// Memory or descriptors are short for a copy.
    pub(crate) fn given(&self, offset: u64, bytes: u64) -> io::Result<ProgramInput> {
        match self {
            Self::Memory { fd, bytes: all } if (offset, bytes) == (0, *all) => {
                Ok(ProgramInput::Memory(sealed(fd)?))
            }
            // The length is below that of a slice.
            part if bytes <= AT_ONCE_MAX => Ok(ProgramInput::Inline(part.read(offset, bytes as usize)?)),
            part => Ok(ProgramInput::Memory(copy(part, offset, bytes)?)),
        }
    }
}

impl ProgramInput {
    pub(crate) fn contents(self, bytes: u64) -> Contents {
        match self {
            Self::Inline(data) => Contents::Inline(data),
            Self::Memory(fd) => Contents::Memory { fd, bytes },
        }
    }
}

/// Seals memory that no process may write to from now on.
///
/// # Errors
/// The memory does not allow seals, or a process has a writable mapping.
pub(crate) fn seal(fd: impl AsFd) -> io::Result<()> {
    let has = fcntl_get_seals(&fd)?;
    if !has.contains(SEALS) {
        fcntl_add_seals(&fd, SEALS.difference(has))?;
    }
    Ok(())
}

fn is_sealed(fd: &Descriptor) -> bool {
    fcntl_get_seals(fd).is_ok_and(|has| has.contains(SEALS))
}

/// Seals and returns this memory. Returns a sealed copy if the memory itself cannot be sealed.
///
/// # Errors
/// Memory or descriptors are short for the copy.
pub(crate) fn sealed(fd: &Descriptor) -> io::Result<Descriptor> {
    if seal(fd).is_ok() {
        return Ok(Arc::clone(fd));
    }
    let bytes = size_of_memory(fd)? as u64;
    copy(&Contents::Memory { fd: Arc::clone(fd), bytes }, 0, bytes)
}

fn copy(from: &Contents, mut offset: u64, mut left: u64) -> io::Result<Descriptor> {
    let mut file = memory("millrace-data")?;
    while left > 0 {
        let piece = left.min(PIECE as u64);
        file.write_all(&from.read(offset, piece as usize)?)?;
        offset += piece;
        left -= piece;
    }
    seal(&file)?;
    Ok(Arc::new(file.into()))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::{pread, pwrite};

    use super::*;

    fn filled(flags: MemfdFlags, bytes: usize) -> Descriptor {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | flags).unwrap();
        assert_eq!(pwrite(&fd, &vec![7u8; bytes], 0).unwrap(), bytes);
        Arc::new(fd)
    }

    fn is_fixed(fd: &Descriptor) -> bool {
        let changes =
            [pwrite(fd, b"x", 0).is_err(), ftruncate(fd, 1).is_err(), ftruncate(fd, 1 << 30).is_err()];
        changes == [true; 3]
    }

    fn bytes_of(fd: &Descriptor) -> Vec<u8> {
        let mut bytes = vec![0u8; size_of_memory(fd).unwrap()];
        let read = pread(fd, &mut bytes[..], 0).unwrap();
        assert_eq!(read, bytes.len());
        bytes
    }

    #[test]
    fn memory_is_sealed_in_place_or_copied_if_it_cannot_be() {
        let bytes = INLINE_BYTES_MAX + 1;
        let made = filled(MemfdFlags::ALLOW_SEALING, bytes);
        assert!(Arc::ptr_eq(&sealed(&made).unwrap(), &made) && is_fixed(&made));
        assert!(Arc::ptr_eq(&sealed(&made).unwrap(), &made), "sealing again changes nothing");
        let others = filled(MemfdFlags::empty(), bytes);
        let copy = sealed(&others).unwrap();
        assert!(!Arc::ptr_eq(&copy, &others) && is_fixed(&copy) && !is_fixed(&others));
        assert_eq!(bytes_of(&copy), vec![7u8; bytes]);
    }

    #[test]
    fn a_program_gets_exactly_the_range_of_the_data() {
        let large = INLINE_BYTES_MAX as u64 + 1;
        let fd = filled(MemfdFlags::ALLOW_SEALING, 3 * PIECE);
        let whole = Contents::Memory { fd, bytes: 3 * PIECE as u64 };
        let inline = Contents::Inline(vec![7u8; 3 * PIECE].into());
        for (contents, offset, bytes) in
            [(&whole, 0, large), (&whole, 5, 2 * PIECE as u64 + 5), (&inline, 5, large), (&inline, 0, 3)]
        {
            match contents.given(offset, bytes).unwrap() {
                ProgramInput::Inline(data) => assert_eq!(data, vec![7u8; bytes as usize]),
                ProgramInput::Memory(fd) => {
                    assert!(is_fixed(&fd) && bytes >= large);
                    assert_eq!(bytes_of(&fd), vec![7u8; bytes as usize]);
                }
            }
        }
        assert!(whole.given(1, 3 * PIECE as u64).is_err(), "a range past the end is refused");
    }
}
