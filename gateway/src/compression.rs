//! Compression of responses, over both protocols.

use std::collections::VecDeque;
use std::io::{self, Write as _};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use millrace_types::{Failure, Reason};

use crate::decompression::ContentEncoding;

/// Size in bytes below which compression costs more than it saves.
pub(crate) const COMPRESS_MIN: usize = 1 << 10;
/// Size in bytes from which a bulk thread compresses the response.
pub(crate) const COMPRESS_APART_MIN: usize = 64 << 10;

/// Compresses the pieces of a response into one piece.
pub(crate) fn compressed(encoding: ContentEncoding, pieces: VecDeque<Bytes>) -> Result<Vec<u8>, Failure> {
    let compress = || -> io::Result<Vec<u8>> {
        match encoding {
            ContentEncoding::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                pieces.iter().try_for_each(|piece| encoder.write_all(piece))?;
                encoder.finish()
            }
            ContentEncoding::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
                pieces.iter().try_for_each(|piece| encoder.write_all(piece))?;
                encoder.finish()
            }
        }
    };
    compress().map_err(|error| internal(&error))
}

fn internal(error: &dyn std::error::Error) -> Failure {
    Failure::new(Reason::Internal, format!("cannot compress the response: {error}")).after_execution()
}
