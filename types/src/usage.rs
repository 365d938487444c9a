//! What a function is billed for (T26; Torpor §8, §2.1).
//!
//! ```text
//!   charge = 1.0 * busy + 0.1 * idle, in GPU time
//! ```
//!
//! *Busy* is the GPU time of requests that were answered, each rounded up to the millisecond it
//! began; attempts that nobody got an answer of cost nothing. *Idle* is residence: the time in which
//! a node kept the function in host memory, ready, while none of its requests was on a GPU. It is
//! counted once for each node that keeps the function, whatever the size of its model and however
//! many of its revisions are kept, and rounded down to a millisecond once per node. A moment is busy
//! or idle and never both; what a request waits and what its model is swapped is neither.
//!
//! Torpor charges "10% of the GPU cost" for that time, so the unit is time of a GPU and not bytes:
//! a model of any size takes the place of one when it runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a millisecond of idle residence costs, in nanoseconds of GPU time: a tenth.
pub const IDLE_MS_COSTS_NS: u64 = 100_000;

/// What a function used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Usage {
    /// Time its runs held a GPU, in nanoseconds: whole milliseconds for each request.
    pub gpu_ns: u64,
    /// Requests answered.
    pub requests: u64,
    /// Idle residence in host memory, in milliseconds.
    pub idle_ms: u64,
}

/// Numbers without names. What was written before idle residence was billed has two of them.
#[derive(Serialize, Deserialize)]
struct Stored(u64, u64, #[serde(default)] u64);

impl From<Stored> for Usage {
    fn from(Stored(gpu_ns, requests, idle_ms): Stored) -> Self {
        Self { gpu_ns, requests, idle_ms }
    }
}

impl From<Usage> for Stored {
    fn from(usage: Usage) -> Self {
        Self(usage.gpu_ns, usage.requests, usage.idle_ms)
    }
}

impl Usage {
    /// Nothing.
    pub const NONE: Self = Self { gpu_ns: 0, requests: 0, idle_ms: 0 };

    /// Each, added up.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            gpu_ns: self.gpu_ns.saturating_add(other.gpu_ns),
            requests: self.requests.saturating_add(other.requests),
            idle_ms: self.idle_ms.saturating_add(other.idle_ms),
        }
    }

    /// What was used since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            gpu_ns: self.gpu_ns.saturating_sub(earlier.gpu_ns),
            requests: self.requests.saturating_sub(earlier.requests),
            idle_ms: self.idle_ms.saturating_sub(earlier.idle_ms),
        }
    }

    /// The larger of each: the later of two cumulative reports, in whatever order they come.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self {
            gpu_ns: self.gpu_ns.max(other.gpu_ns),
            requests: self.requests.max(other.requests),
            idle_ms: self.idle_ms.max(other.idle_ms),
        }
    }

    /// Time its runs held a GPU.
    #[must_use]
    pub const fn busy(self) -> Duration {
        Duration::from_nanos(self.gpu_ns)
    }

    /// Idle residence.
    #[must_use]
    pub const fn idle(self) -> Duration {
        Duration::from_millis(self.idle_ms)
    }

    /// What it costs, as time of a GPU: all of busy, a tenth of idle. Exact, so that the charges of
    /// parts add up to the charge of the whole.
    #[must_use]
    pub const fn charge(self) -> Duration {
        let idle = Duration::from_nanos(self.idle_ms.saturating_mul(IDLE_MS_COSTS_NS));
        self.busy().saturating_add(idle)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cumulative_reports_merge_in_any_order() {
        let early = Usage { gpu_ns: 5, requests: 1, idle_ms: 30 };
        let late = Usage { gpu_ns: 9, requests: 2, idle_ms: 40 };
        assert_eq!(early.merge(late), late);
        assert_eq!(late.merge(early), late);
        assert_eq!(late.since(early), Usage { gpu_ns: 4, requests: 1, idle_ms: 10 });
    }

    #[test]
    fn a_gpu_second_costs_ten_idle_ones() {
        let usage = Usage { gpu_ns: 2_000_000_000, requests: 7, idle_ms: 30_000 };
        assert_eq!(usage.charge(), Duration::from_secs(5));
        assert_eq!(Usage { idle_ms: 1, ..Usage::NONE }.charge(), Duration::from_micros(100));
    }

    #[test]
    fn what_was_stored_before_idle_residence_was_billed_has_none() {
        let old: Usage = serde_saphyr::from_str("[5, 2]").unwrap();
        assert_eq!(old, Usage { gpu_ns: 5, requests: 2, idle_ms: 0 });
        let new: Usage = serde_saphyr::from_str("[5, 2, 9]").unwrap();
        assert_eq!(new, Usage { idle_ms: 9, ..old });
    }
}
