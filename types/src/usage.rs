//! The billed usage of a function (T26; Torpor §8, §2.1).
//!
//! ```text
//!   charge = 1.0 * busy + 0.1 * idle, in GPU time
//! ```
//!
//! *Busy* is the GPU time of answered requests, on a shared GPU multiplied by the share of the SMs. The time
//! of each request is rounded up to a whole millisecond. Attempts that produced no response cost nothing.
//!
//! *Idle* is residence: the time in which a node kept the function ready in host memory while none
//! of its requests was on a GPU. Idle time is counted once for each node that keeps the function,
//! whatever the size of the model and the number of revisions kept. Idle time is rounded down to a
//! millisecond once per node.
//!
//! A moment is busy or idle and never both. The time in which a request waits or its model is
//! swapped is neither.
//!
//! Torpor charges "10% of the GPU cost" for residence, so the unit is GPU time and not bytes: a
//! model of any size occupies a whole GPU while it runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The cost of a millisecond of idle residence, in nanoseconds of GPU time: a tenth.
pub const IDLE_MS_COSTS_NS: u64 = 100_000;

/// The usage of a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "StoredUsage", into = "StoredUsage")]
pub struct Usage {
    /// GPU time of the function's runs, in nanoseconds: whole milliseconds for each request.
    pub gpu_ns: u64,
    /// The number of answered requests.
    pub requests: u64,
    /// Idle residence in host memory, in milliseconds.
    pub idle_ms: u64,
}

/// The stored form: a tuple without field names. Records from before idle residence was billed have
/// two numbers.
#[derive(Serialize, Deserialize)]
struct StoredUsage(u64, u64, #[serde(default)] u64);

impl From<StoredUsage> for Usage {
    fn from(StoredUsage(gpu_ns, requests, idle_ms): StoredUsage) -> Self {
        Self { gpu_ns, requests, idle_ms }
    }
}

impl From<Usage> for StoredUsage {
    fn from(usage: Usage) -> Self {
        Self(usage.gpu_ns, usage.requests, usage.idle_ms)
    }
}

impl Usage {
    /// No usage.
    pub const NONE: Self = Self { gpu_ns: 0, requests: 0, idle_ms: 0 };

    /// Returns the sum of each quantity.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            gpu_ns: self.gpu_ns.saturating_add(other.gpu_ns),
            requests: self.requests.saturating_add(other.requests),
            idle_ms: self.idle_ms.saturating_add(other.idle_ms),
        }
    }

    /// Returns the usage since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            gpu_ns: self.gpu_ns.saturating_sub(earlier.gpu_ns),
            requests: self.requests.saturating_sub(earlier.requests),
            idle_ms: self.idle_ms.saturating_sub(earlier.idle_ms),
        }
    }

    /// Returns the larger value of each quantity. Of two cumulative reports this is the later one,
    /// whichever arrived first.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self {
            gpu_ns: self.gpu_ns.max(other.gpu_ns),
            requests: self.requests.max(other.requests),
            idle_ms: self.idle_ms.max(other.idle_ms),
        }
    }

    /// Returns the GPU time of the function's runs.
    #[must_use]
    pub const fn busy(self) -> Duration {
        Duration::from_nanos(self.gpu_ns)
    }

    /// Returns the time of idle residence in host memory.
    #[must_use]
    pub const fn idle(self) -> Duration {
        Duration::from_millis(self.idle_ms)
    }

    /// Returns the charge in GPU time: all of busy and a tenth of idle. The charge is exact, so
    /// that the charges of parts add up to the charge of the whole.
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
    fn cumulative_reports_merge_to_the_later_in_any_order() {
        let early = Usage { gpu_ns: 5, requests: 1, idle_ms: 30 };
        let late = Usage { gpu_ns: 9, requests: 2, idle_ms: 40 };
        assert_eq!(early.merge(late), late);
        assert_eq!(late.merge(early), late);
        assert_eq!(late.since(early), Usage { gpu_ns: 4, requests: 1, idle_ms: 10 });
    }

    #[test]
    fn a_busy_second_costs_as_much_as_ten_idle_seconds() {
        let usage = Usage { gpu_ns: 2_000_000_000, requests: 7, idle_ms: 30_000 };
        assert_eq!(usage.charge(), Duration::from_secs(5));
        assert_eq!(Usage { idle_ms: 1, ..Usage::NONE }.charge(), Duration::from_micros(100));
    }

    #[test]
    fn records_stored_before_idle_billing_have_no_idle_time() {
        let old: Usage = serde_saphyr::from_str("[5, 2]").unwrap();
        assert_eq!(old, Usage { gpu_ns: 5, requests: 2, idle_ms: 0 });
        let new: Usage = serde_saphyr::from_str("[5, 2, 9]").unwrap();
        assert_eq!(new, Usage { idle_ms: 9, ..old });
    }
}
