//! The memory that a gRPC message takes once it is decoded: refused where it is out of proportion to the
//! message, and charged where it exceeds the message's bytes.

use millrace_proto::decoding::{DecodeRefusal, MessageType, MessageWalk, WalkLimits};
use millrace_proto::status::to_status;
use tonic::Status;

use millrace_transport::PREFIX_LEN;

/// Bytes of a message's structures that are not charged: every small call takes about as much beside
/// its message.
const UNCHARGED_BYTES: u64 = 4 << 10;

/// The check of one message on its way in. A default one checks nothing.
#[derive(Debug, Default)]
pub(crate) struct MessageCheck {
    walk: Option<MessageWalk>,
    /// The message's length; of an inflating one, as far as it is known.
    len: u64,
    /// Bytes read, the prefix included.
    read: usize,
    /// Bytes charged beyond the message's own.
    charged: u64,
}

impl MessageCheck {
    /// Of a message that arrives plain, behind its prefix.
    pub(crate) fn plain(message_type: Option<MessageType>, len: usize) -> Self {
        let len = len as u64;
        let walk = message_type.map(|kind| MessageWalk::new(kind, Some(len), WalkLimits::CLIENT));
        Self { walk, len, ..Self::default() }
    }

    /// Of a message that is inflated behind room for its prefix.
    pub(crate) fn inflating(message_type: Option<MessageType>) -> Self {
        let walk = message_type.map(|kind| MessageWalk::new(kind, None, WalkLimits::CLIENT));
        Self { walk, ..Self::default() }
    }

    /// Reads the next piece; how many bytes to charge for it beyond its own.
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

    /// Reads what is new of the message and its prefix, all of which `whole` holds so far.
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
