//! The sources of copies into a region of an emulated GPU.

use std::borrow::Cow;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use crate::emulated::extent::Chunk;
use crate::emulated::region::{self, IssuedFill};
use crate::error::Error;
use crate::faults::Faults;
use crate::memfd;
use crate::memory::{HostAccess, HostRegion};

/// The source of a copy into a region.
#[derive(Debug)]
pub(super) enum FillSource<'a> {
    Host(Cow<'a, HostRegion>),
    /// The peer's memory is read and not mapped, because its owner may write to it at any time.
    Peer(Cow<'a, Chunk>, u64),
    /// The file is read and not mapped, because other processes may write to it at any time.
    File(FileSource<'a>),
    Bytes(Cow<'a, [u8]>),
}

#[derive(Debug)]
pub(super) enum FileSource<'a> {
    Lent(BorrowedFd<'a>),
    Own(OwnedFd),
}

impl FillSource<'_> {
    /// Returns a source that owns the bytes to read, for work on another thread.
    pub(super) fn into_owned(self) -> Result<FillSource<'static>, Error> {
        Ok(match self {
            Self::Host(host) => FillSource::Host(Cow::Owned(host.into_owned())),
            Self::Peer(peer, offset) => FillSource::Peer(Cow::Owned(peer.into_owned()), offset),
            Self::File(file) => FillSource::File(FileSource::Own(file.into_owned()?)),
            Self::Bytes(bytes) => FillSource::Bytes(Cow::Owned(bytes.into_owned())),
        })
    }
}

impl FileSource<'_> {
    pub(super) fn into_owned(self) -> Result<OwnedFd, Error> {
        match self {
            Self::Lent(file) => file.try_clone_to_owned().map_err(Error::io("share a file")),
            Self::Own(file) => Ok(file),
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Lent(file) => *file,
            Self::Own(file) => file.as_fd(),
        }
    }
}

/// Carries out a copy into a region.
pub(super) fn carry_out(
    faults: &Faults,
    fill: IssuedFill,
    bytes: Range<u64>,
    source: &FillSource<'_>,
    buffer: &mut Vec<u8>,
) -> Result<(), Error> {
    faults.may_copy()?;
    // A copy through the buffer has at most COPY_MAX bytes, so the cast is lossless.
    let length = (bytes.end - bytes.start) as usize;
    match source {
        FillSource::Host(host) => {
            let source = region::part(host.as_slice(), &bytes)?;
            match host.access() {
                HostAccess::Direct => return fill.finish(source),
                HostAccess::Buffered => {
                    buffer.resize(length, 0);
                    buffer.copy_from_slice(source);
                }
            }
        }
        FillSource::Peer(peer, offset) => {
            buffer.resize(length, 0);
            memfd::read_at(&peer.file, buffer, peer.extent.offset + offset)?;
        }
        FillSource::File(file) => {
            buffer.resize(length, 0);
            memfd::read_at(file.as_fd(), buffer, bytes.start)?;
        }
        FillSource::Bytes(source) => return fill.finish(source),
    }
    fill.finish(buffer)
}
