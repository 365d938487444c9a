//! GPU sharing after FaST-GShare: packing slices (`PACK`, `CHURN`), giving tokens (`TOKENS`) and capping time
//! (`CAP`). The experiments run the cores of `millrace_slices` themselves, without a simulated cluster.

mod cap;
mod churn;
mod pack;
mod tokens;

use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_slices::pack::SliceDemand;
use millrace_slices::tokens::{Config, QuotaCap, TokenOrder};
use millrace_slices::units::Grid;
use millrace_types::{Bytes, Permille, SliceId, Terms};

use crate::Experiment;

pub const EXPERIMENTS: [Experiment; 4] = [
    Experiment { id: "PACK", title: "FaST-GShare: eight pods in each order of arrival", run: pack::pack },
    Experiment {
        id: "TOKENS",
        title: "FaST-GShare: requests met by the order of tokens",
        run: tokens::tokens,
    },
    Experiment { id: "CHURN", title: "FaST-GShare: GPUs in use while pods come and go", run: churn::churn },
    Experiment { id: "CAP", title: "FaST-GShare: the tail under a window and under a bucket", run: cap::cap },
];

/// Shares of the SMs in the paper's profiles, in percent (section 5.2).
const SMS: [u16; 7] = [6, 12, 24, 50, 60, 80, 100];
const SECOND: Duration = Duration::from_secs(1);
const AGE: Duration = Duration::from_secs(2);
/// Our order of tokens.
const SKIP: TokenOrder = TokenOrder::Skip { age: AGE };
/// Memory does not bound these experiments.
const MEMORY: Bytes = Bytes::gib(16);

/// Returns a configuration with percentages of the SMs, as the paper has them.
fn percentages(order: TokenOrder, cap: QuotaCap, token: Duration) -> Result<Config> {
    Config::new(Grid::Caps100, token, order, cap).context("invalid configuration of tokens")
}

/// Returns our rule with percentages of the SMs.
fn ours() -> Result<Config> {
    percentages(SKIP, QuotaCap::Bucket(SECOND), Config::SLICES.token())
}

/// Returns the terms of a partition in percent of the SMs, with a request in thousandths of the time.
fn terms(request: u16, sm: u16) -> Result<Terms> {
    let sms = Permille::new(sm * 10).context("invalid share of the SMs")?;
    let request = Permille::new(request).context("invalid request")?;
    Terms::new(sms, sms, request, Permille::ALL).context("invalid terms")
}

/// Returns a slice without memory.
fn slice(id: u64, terms: Terms) -> SliceDemand {
    SliceDemand { id: SliceId(id), terms, memory: Bytes::ZERO, bandwidth: Permille::ZERO }
}
