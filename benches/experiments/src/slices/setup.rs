//! The setup that the experiments on slices share: shares of the SMs, rules, terms and slices.

use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_slices::pack::SliceDemand;
use millrace_slices::tokens::{Config, QuotaCap, TokenOrder};
use millrace_slices::units::Grid;
use millrace_types::{Bytes, Permille, SliceId, Terms};

/// Shares of the SMs in the paper's profiles, in percent (section 5.2).
pub(super) const SMS: [u16; 7] = [6, 12, 24, 50, 60, 80, 100];
pub(super) const SECOND: Duration = Duration::from_secs(1);
const AGE: Duration = Duration::from_secs(2);
/// Our order of tokens.
pub(super) const SKIP: TokenOrder = TokenOrder::Skip { age: AGE };
/// Memory does not bound these experiments.
pub(super) const MEMORY: Bytes = Bytes::gib(16);

/// Returns a configuration with percentages of the SMs, as the paper has them.
pub(super) fn percentages(order: TokenOrder, cap: QuotaCap, token: Duration) -> Result<Config> {
    Config::new(Grid::Caps100, token, order, cap).context("invalid configuration of tokens")
}

/// Returns our rule with percentages of the SMs.
pub(super) fn ours() -> Result<Config> {
    percentages(SKIP, QuotaCap::Bucket(SECOND), Config::SLICES.token())
}

/// Returns the terms of a partition in percent of the SMs, with a request in thousandths of the time.
pub(super) fn terms(request: u16, sm: u16) -> Result<Terms> {
    let sms = Permille::new(sm * 10).context("invalid share of the SMs")?;
    let request = Permille::new(request).context("invalid request")?;
    Terms::new(sms, sms, request, Permille::ALL).context("invalid terms")
}

/// Returns a slice without memory.
pub(super) fn slice(id: u64, terms: Terms) -> SliceDemand {
    SliceDemand { id: SliceId(id), terms, memory: Bytes::ZERO, bandwidth: Permille::ZERO }
}
