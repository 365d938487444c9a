//! Events, actions and configuration of the token core.

use std::time::Duration;

use millrace_types::{ComputeCurve, SliceId, SmShare, Terms, Timestamp};

use crate::units::Grid;

/// Identifier of a holder of tokens, chosen by the caller; not the id of a run in an executor. The Gpu core
/// uses the number of a seat's period. An identifier is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenHolder(pub u64);

/// Identifier of a token. An identifier is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u64);

/// Input of the token core.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// A slice is new on this GPU, or has new terms. New terms take effect at the slice's next token.
    Terms { slice: SliceId, terms: Terms },
    /// A slice left this GPU. Its runs get no further token.
    Gone { slice: SliceId },
    /// A run wants a token; if it holds one, the token after that. An unknown slice is ignored, because the
    /// slice may have left while the message was in flight.
    Ask { slice: SliceId, run: TokenHolder, deadline: Option<Timestamp>, curve: ComputeCurve },
    /// A token was used up or given back. `busy` is the device time of the launches under the token. An unknown
    /// token is ignored, because the core may have restarted since.
    Spent { run: TokenHolder, token: TokenId, busy: Duration, more: bool },
    /// A run ended, was cancelled or died.
    Left { run: TokenHolder },
    /// The time of [`next_wake`](super::TokenCore::next_wake) has come.
    Tick,
}

/// Output of the token core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// The run may launch on these SMs. Without `busy` the token is open: it has no end yet. A run that holds a
    /// token begins the new one after it.
    Grant { run: TokenHolder, token: TokenId, on: SmShare, busy: Option<Duration> },
    /// A token ends after this device time, counted from its beginning.
    Shorten { run: TokenHolder, token: TokenId, busy: Duration },
    /// A token that has not begun is taken back. The units stay taken until the token's `Spent` arrives.
    Withdraw { run: TokenHolder, token: TokenId },
    /// A slice wanted to run during a whole period, and got so much less than its request.
    Starved { slice: SliceId, missed: Duration },
    /// The measured device time of a token. `alone`: no other run held a token meanwhile.
    Sample { run: TokenHolder, on: SmShare, busy: Duration, alone: bool },
}

/// The order in which waiting runs get tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenOrder {
    /// The paper's order: largest gap to the request first; the first run that does not fit stops the line (F10,
    /// F11).
    Head,
    /// Largest gap first, then by deadline; a run that does not fit is skipped. A run that was skipped for `age`
    /// goes first and is no longer passed.
    Skip { age: Duration },
    /// Time slicing: one run at a time, in turn.
    Turns,
    /// Racing: all runs at once, without a check of the sum of their SMs.
    All,
}

/// The accounting of a slice's limit and request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QuotaCap {
    /// The paper's window: used time is set to zero at each multiple of this time (F02).
    Window(Duration),
    /// A bucket that gains `limit` of the time, and holds at most `limit` of this time.
    Bucket(Duration),
}

impl QuotaCap {
    /// Returns the time over which requests and limits are counted.
    #[must_use]
    pub const fn period(self) -> Duration {
        match self {
            Self::Window(period) | Self::Bucket(period) => period,
        }
    }
}

/// Least length of a token.
pub const TOKEN_MIN: Duration = Duration::from_millis(1);
/// Greatest length of a token.
pub const TOKEN_MAX: Duration = Duration::from_millis(50);
/// Greatest period of a quota.
pub const PERIOD_MAX: Duration = Duration::from_secs(60);

/// The checked configuration of a token core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    grid: Grid,
    token: Duration,
    order: TokenOrder,
    cap: QuotaCap,
}

impl Config {
    /// The rule of the paper: percentages, the first misfit stops the line, a window of 1 s. The paper does not
    /// state a token's length.
    pub const PAPER: Self = Self {
        grid: Grid::Caps100,
        token: Duration::from_millis(5),
        order: TokenOrder::Head,
        cap: QuotaCap::Window(Duration::from_secs(1)),
    };

    /// Our rule: disjoint blocks, runs that do not fit are skipped, a bucket of 1 s.
    pub const SLICES: Self = Self {
        grid: Grid::Blocks16,
        token: Duration::from_millis(5),
        order: TokenOrder::Skip { age: Duration::from_secs(2) },
        cap: QuotaCap::Bucket(Duration::from_secs(1)),
    };

    /// Checks a configuration with tokens of `token` of device time.
    ///
    /// # Errors
    ///
    /// Fails if a length is out of bounds, or if runs would race for disjoint blocks.
    pub fn new(grid: Grid, token: Duration, order: TokenOrder, cap: QuotaCap) -> Result<Self, ConfigError> {
        if !(TOKEN_MIN..=TOKEN_MAX).contains(&token) {
            return Err(ConfigError::Token(token));
        }
        if !(token..=PERIOD_MAX).contains(&cap.period()) {
            return Err(ConfigError::Period { period: cap.period(), token });
        }
        if order == TokenOrder::All && grid == Grid::Blocks16 {
            return Err(ConfigError::RaceForBlocks);
        }
        Ok(Self { grid, token, order, cap })
    }

    /// Returns the division of the SMs.
    #[must_use]
    pub const fn grid(&self) -> Grid {
        self.grid
    }

    /// Returns the device time of a token.
    #[must_use]
    pub const fn token(&self) -> Duration {
        self.token
    }

    /// Returns the order of waiting runs.
    #[must_use]
    pub const fn order(&self) -> TokenOrder {
        self.order
    }

    /// Returns the accounting of limits and requests.
    #[must_use]
    pub const fn cap(&self) -> QuotaCap {
        self.cap
    }
}

/// The fault of a refused [`Config`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("a token of {0:?} is out of bounds: choose from {TOKEN_MIN:?} to {TOKEN_MAX:?}")]
    Token(Duration),
    #[error(
        "a quota period of {period:?} is out of bounds: choose from a token ({token:?}) to {PERIOD_MAX:?}"
    )]
    Period { period: Duration, token: Duration },
    #[error("runs cannot race for disjoint blocks: choose percentages of the SMs, or another token order")]
    RaceForBlocks,
}
