//! The clients' record of each request of a sequence, which the oracle judges.

use std::time::Duration;

/// The result of a request of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SequenceRequestResult {
    /// The answer has the expected count.
    Counted,
    /// The answer has another count, or belongs to another sequence.
    Miscounted(String),
    /// An error reports that the sequence does not exist, or no longer exists.
    Over(String),
    /// The request was not answered, and may have been carried out.
    Unclear(String),
    /// The request was refused for good for another reason, or was still refused when the client
    /// gave up.
    Refused(String),
}

/// A request of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceRequest {
    /// The name of the sequence, which a client may start again under the same id.
    pub sequence: String,
    /// The position of the request in the sequence, from 1.
    pub place: u32,
    /// Whether the request ends the sequence.
    pub last: bool,
    /// Time of the first try, since the start of the run.
    pub begun: Duration,
    /// Time of the end, since the start of the run.
    pub ended: Duration,
    pub how: SequenceRequestResult,
}

impl SequenceRequest {
    /// Returns a line of evidence.
    pub(crate) fn line(&self, why: &str) -> String {
        let from = self.begun.as_secs_f64();
        let to = self.ended.as_secs_f64();
        format!("{from:>9.3} .. {to:>9.3}  request {} of {}: {why}", self.place, self.sequence)
    }
}
