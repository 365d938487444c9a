//! The periods of seats that the executor does not know of yet.

use std::collections::BTreeMap;

use millrace_gpu::{ExecutorSeat, RunTokens};
use millrace_slices::gate::SeatToken;

/// A period of a seat that the executor does not know of yet.
#[derive(Debug, Default)]
pub(super) struct UnsentPeriod {
    pub(super) first: Option<SeatToken>,
    /// Whether the seat gave its token back, and has to ask for another.
    pub(super) asks: bool,
}

/// The periods of seats that the executor does not know of yet.
#[derive(Debug, Default)]
pub(super) struct UnsentPeriods(pub(super) BTreeMap<ExecutorSeat, UnsentPeriod>);

impl UnsentPeriods {
    /// Notes that a run was decided on.
    pub(super) fn begin(&mut self, seat: ExecutorSeat, tokens: RunTokens) {
        if tokens.anew {
            self.0.insert(seat, UnsentPeriod { first: tokens.first, asks: false });
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
