//! Decompression with two bounds: on the decompressed size of a message, and by the byte budget,
//! which is charged as the message expands. The input may arrive in any pieces.

use std::io::{self, Write as _};

use bytes::BytesMut;
use flate2::write::MultiGzDecoder;
use flate2::{Decompress, FlushDecompress, Status};
use millrace_types::Failure;

use crate::budget::{ByteCharge, too_large};

/// Most input bytes per call of the decoder, so that other messages get a turn in between. At
/// deflate's best ratio of about 1:1000, this much input takes about 20 ms.
pub(crate) const STEP: usize = 16 << 10;
/// Most compressed bytes of a message that the reading thread decompresses itself: 1 ms at that ratio.
pub(crate) const STEP_HERE_MAX: usize = 1 << 10;

/// The supported compressions, with HTTP's names: `deflate` is the zlib format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentEncoding {
    Gzip,
    Deflate,
}

impl ContentEncoding {
    pub(crate) fn from_name(name: &[u8]) -> Option<Self> {
        match name {
            b"gzip" | b"x-gzip" => Some(Self::Gzip),
            b"deflate" => Some(Self::Deflate),
            _ => None,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }
}

/// The decompression of a single message.
pub(crate) struct Inflater {
    decoder: Decoder,
    encoding: ContentEncoding,
}

enum Decoder {
    Gzip(MultiGzDecoder<Sink>),
    Deflate(Zlib),
}

/// A zlib decoder that knows whether the end was reached. flate2's own zlib writer accepts a
/// truncated stream as complete.
struct Zlib {
    state: Decompress,
    ended: bool,
    sink: Sink,
}

/// The decompressed bytes, within the limits.
struct Sink {
    plain: BytesMut,
    len_max: usize,
    charge: ByteCharge,
}

impl Inflater {
    /// Creates a decoder. Its output starts with `prefix`, followed by at most `len_max` decompressed
    /// bytes, which are added to `charge`.
    pub(crate) fn new(encoding: ContentEncoding, prefix: &[u8], len_max: usize, charge: ByteCharge) -> Self {
        let sink = Sink { plain: BytesMut::from(prefix), len_max: len_max + prefix.len(), charge };
        let decoder = match encoding {
            ContentEncoding::Gzip => Decoder::Gzip(MultiGzDecoder::new(sink)),
            ContentEncoding::Deflate => {
                Decoder::Deflate(Zlib { state: Decompress::new(true), ended: false, sink })
            }
        };
        Self { decoder, encoding }
    }

    /// Decompresses the next piece of input, which should have at most [`STEP`] bytes.
    pub(crate) fn push(&mut self, compressed: &[u8]) -> Result<(), Failure> {
        let written = match &mut self.decoder {
            Decoder::Gzip(decoder) => decoder.write_all(compressed),
            Decoder::Deflate(zlib) => zlib.push(compressed),
        };
        written.map_err(|error| self.failure(error))
    }

    /// Returns the prefix and the decompressed bytes so far.
    pub(crate) fn plain(&self) -> &[u8] {
        match &self.decoder {
            Decoder::Gzip(decoder) => &decoder.get_ref().plain,
            Decoder::Deflate(zlib) => &zlib.sink.plain,
        }
    }

    /// Charges `more` bytes in addition to the decompressed bytes, for data that is made of them.
    pub(crate) fn charge(&mut self, more: u64) -> Result<(), Failure> {
        let sink = match &mut self.decoder {
            Decoder::Gzip(decoder) => decoder.get_mut(),
            Decoder::Deflate(zlib) => &mut zlib.sink,
        };
        sink.charge.grow(more)
    }

    /// Returns the prefix and the decompressed bytes, with the charge.
    pub(crate) fn finish(self) -> Result<(BytesMut, ByteCharge), Failure> {
        let encoding = self.encoding;
        let sink = match self.decoder {
            Decoder::Gzip(decoder) => decoder.finish(),
            Decoder::Deflate(zlib) => zlib.finish(),
        };
        sink.map(|sink| (sink.plain, sink.charge)).map_err(|error| failure(encoding, error))
    }

    fn failure(&self, error: io::Error) -> Failure {
        failure(self.encoding, error)
    }
}

impl Zlib {
    fn push(&mut self, mut compressed: &[u8]) -> io::Result<()> {
        let mut plain = [0; 4 * STEP];
        loop {
            if self.ended {
                let trailing =
                    io::Error::new(io::ErrorKind::InvalidData, "bytes after the end of the stream");
                return if compressed.is_empty() { Ok(()) } else { Err(trailing) };
            }
            let read = self.state.total_in();
            let written = self.state.total_out();
            let status = self.state.decompress(compressed, &mut plain, FlushDecompress::None)?;
            // Both differences are below the lengths of the slices, so the casts are lossless.
            let read = (self.state.total_in() - read) as usize;
            let written = (self.state.total_out() - written) as usize;
            compressed = &compressed[read..];
            self.sink.write_all(&plain[..written])?;
            self.ended = status == Status::StreamEnd;
            if !self.ended && written < plain.len() && compressed.is_empty() {
                return Ok(());
            }
            if !self.ended && (read, written) == (0, 0) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "no progress"));
            }
        }
    }

    fn finish(self) -> io::Result<Sink> {
        if self.ended { Ok(self.sink) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

fn failure(encoding: ContentEncoding, error: io::Error) -> Failure {
    let ours = error.get_ref().and_then(|inner| inner.downcast_ref::<Failure>());
    ours.cloned()
        .unwrap_or_else(|| Failure::malformed(format!("the body is not valid {}: {error}", encoding.name())))
}

impl io::Write for Sink {
    fn write(&mut self, plain: &[u8]) -> io::Result<usize> {
        if plain.len() > self.len_max - self.plain.len() {
            return Err(io::Error::other(too_large("the decompressed body", self.len_max)));
        }
        self.charge.grow(plain.len() as u64).map_err(io::Error::other)?;
        self.plain.extend_from_slice(plain);
        Ok(plain.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};
    use millrace_types::{Bytes, Reason};

    use super::*;
    use crate::budget::ByteBudget;

    fn deflate(encoding: ContentEncoding, plain: &[u8]) -> Vec<u8> {
        match encoding {
            ContentEncoding::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
                encoder.write_all(plain).unwrap();
                encoder.finish().unwrap()
            }
            ContentEncoding::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
                encoder.write_all(plain).unwrap();
                encoder.finish().unwrap()
            }
        }
    }

    fn inflate(
        encoding: ContentEncoding,
        input: &[u8],
        len_max: usize,
        budget: &ByteBudget,
    ) -> Result<Vec<u8>, Failure> {
        let mut inflater = Inflater::new(encoding, b">", len_max, budget.share().try_take(0)?);
        for piece in input.chunks(7) {
            inflater.push(piece)?;
        }
        inflater.finish().map(|(plain, _charge)| plain.to_vec())
    }

    #[test]
    fn decompressed_bytes_follow_the_prefix() {
        let budget = ByteBudget::new(Bytes::mib(1), Bytes::mib(1));
        let plain = b"the same again ".repeat(1000);
        for encoding in [ContentEncoding::Gzip, ContentEncoding::Deflate] {
            let out = inflate(encoding, &deflate(encoding, &plain), 1 << 20, &budget).unwrap();
            assert_eq!(out, [b">".as_slice(), &plain].concat());
        }
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_decompression_bomb_is_refused_at_the_limit_and_at_the_budget() {
        for encoding in [ContentEncoding::Gzip, ContentEncoding::Deflate] {
            let bomb = deflate(encoding, &vec![0; 16 << 20]);
            assert!(bomb.len() < 20_000, "{}", bomb.len());
            let wide = ByteBudget::new(Bytes::gib(1), Bytes::mib(1));
            let over_limit = inflate(encoding, &bomb, 1 << 20, &wide).unwrap_err();
            assert_eq!((over_limit.reason, over_limit.retryable), (Reason::ByteBudgetExceeded, false));
            let narrow = ByteBudget::new(Bytes::mib(2), Bytes::mib(2));
            let over_budget = inflate(encoding, &bomb, 32 << 20, &narrow).unwrap_err();
            assert_eq!((over_budget.reason, over_budget.retryable), (Reason::ByteBudgetExceeded, true));
            assert_eq!((wide.used(), narrow.used()), (0, 0));
        }
    }

    #[test]
    fn garbage_and_truncation_are_malformed() {
        let budget = ByteBudget::new(Bytes::mib(1), Bytes::mib(1));
        for encoding in [ContentEncoding::Gzip, ContentEncoding::Deflate] {
            let garbage = inflate(encoding, b"this is not compressed at all", 1 << 20, &budget).unwrap_err();
            assert_eq!(garbage.reason, Reason::MalformedRequest);
            let whole = deflate(encoding, &b"some text ".repeat(100));
            let cut = inflate(encoding, &whole[..whole.len() - 9], 1 << 20, &budget);
            assert_eq!(cut.unwrap_err().reason, Reason::MalformedRequest, "{encoding:?}");
        }
    }
}
