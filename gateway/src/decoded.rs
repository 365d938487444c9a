//! The memory that a gRPC message uses once it is decoded. A message with a disproportionately large
//! decoded form is refused, and decoded memory beyond the message's length is charged.

use millrace_proto::decoding::{DecodeRefusal, MessageType, MessageWalk, WalkLimits};
use millrace_proto::status::to_status;
use tonic::Status;

use millrace_transport::PREFIX_LEN;

/// Bytes of decoded structures that are not charged, because every small call uses about as much
/// besides its message.
const UNCHARGED_BYTES: u64 = 4 << 10;

/// The check of a message while it arrives. The default value checks nothing.
#[derive(Debug, Default)]
pub(crate) struct MessageCheck {
    walk: Option<MessageWalk>,
    /// Length of the message; for a compressed message, the length decompressed so far.
    len: u64,
    /// Number of bytes read, including the prefix.
    read: usize,
    /// Bytes charged beyond the message's own length.
    charged: u64,
}

impl MessageCheck {
    /// Creates the check of an uncompressed message, which arrives after its prefix.
    pub(crate) fn plain(message_type: Option<MessageType>, len: usize) -> Self {
        let len = len as u64;
        let walk = message_type.map(|kind| MessageWalk::new(kind, Some(len), WalkLimits::CLIENT));
        Self { walk, len, ..Self::default() }
    }

    /// Creates the check of a message that is being decompressed behind space for its prefix.
    pub(crate) fn inflating(message_type: Option<MessageType>) -> Self {
        let walk = message_type.map(|kind| MessageWalk::new(kind, None, WalkLimits::CLIENT));
        Self { walk, ..Self::default() }
    }

    /// Reads the next piece. Returns the number of bytes to charge beyond the piece's own.
    pub(crate) fn read(&mut self, piece: &[u8]) -> Result<u64, Status> {
        let prefix = PREFIX_LEN.saturating_sub(self.read).min(piece.len());
        self.read += piece.len();
        let Some(walk) = &mut self.walk else { return Ok(0) };
        walk.push(&piece[prefix..]).map_err(|refusal| status(&refusal))?;
        let len = self.len.max(self.read as u64).max(UNCHARGED_BYTES);
        let more = walk.decoded_bytes().saturating_sub(len).saturating_sub(self.charged);
        self.charged += more;
        Ok(more)
    }

    /// Reads the new bytes at the end of `whole`, which contains the prefix and the message so far.
    pub(crate) fn read_to(&mut self, whole: &[u8]) -> Result<u64, Status> {
        self.read(&whole[self.read..])
    }

    /// Ends the message.
    pub(crate) fn finish(&mut self) -> Result<(), Status> {
        self.walk.take().map_or(Ok(()), MessageWalk::finish).map_err(|refusal| status(&refusal))
    }
}

fn status(refusal: &DecodeRefusal) -> Status {
    to_status(&refusal.failure())
}
