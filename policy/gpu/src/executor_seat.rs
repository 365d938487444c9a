//! The seats of an executor, as commands and events name them.

use std::fmt;

use millrace_slices::gate::SeatToken;

/// The number of a seat in its executor, from 0 on: less than [`SEATS_MAX`](millrace_core::SEATS_MAX).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecutorSeat(pub u8);

impl fmt::Display for ExecutorSeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The tokens with which a run on a shared GPU begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunTokens {
    /// Whether a period of the seat begins, so that all earlier tokens of the seat are void.
    pub anew: bool,
    /// The first token of a new period; `None` if the token follows.
    pub first: Option<SeatToken>,
}
