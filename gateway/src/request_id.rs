//! Request ids for clients that send none: ULIDs, so that they sort by time, made of a seed and the
//! configured clock.

use std::sync::atomic::{AtomicU64, Ordering};

use http::HeaderMap;
use millrace_types::RequestId;
use ulid::Ulid;

use crate::config::WallClock;

/// Header and metadata key of a request's id, in both directions.
pub(crate) const HEADER: &str = "x-request-id";

/// The generator of request ids.
pub(crate) struct RequestIds {
    wall_clock: WallClock,
    start: u128,
    made: AtomicU64,
}

impl RequestIds {
    pub(crate) fn new(wall_clock: WallClock, seed: u64) -> Self {
        let start = u128::from(mix(seed)) << 64 | u128::from(mix(seed ^ 0x5bd1_e995));
        Self { wall_clock, start, made: AtomicU64::new(0) }
    }

    /// Returns the client's id if it is valid, and a new id otherwise.
    pub(crate) fn of(&self, headers: &HeaderMap) -> RequestId {
        let brought = headers.get(HEADER).and_then(|id| RequestId::new(id.to_str().ok()?));
        brought.unwrap_or_else(|| self.next())
    }

    /// Returns a new id.
    pub(crate) fn next(&self) -> RequestId {
        let unix_ms = u64::try_from((self.wall_clock)().as_millis()).unwrap_or(u64::MAX);
        // Consecutive numbers from a random start are unique without a lock.
        let made = u128::from(self.made.fetch_add(1, Ordering::Relaxed));
        let id = Ulid::from_parts(unix_ms, self.start.wrapping_add(made));
        let mut text = [0; ulid::ULID_LEN];
        RequestId::new(id.array_to_str(&mut text)).expect("a ULID is 26 ASCII letters and digits")
    }
}

/// SplitMix64's finaliser, which spreads a seed's bits.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    fn ids(seed: u64) -> RequestIds {
        RequestIds::new(Arc::new(|| Duration::from_millis(1_700_000_000_000)), seed)
    }

    #[test]
    fn ids_are_unique_and_determined_by_the_seed() {
        let a = ids(1);
        let again = ids(1);
        let b = ids(2);
        let of = |ids: &RequestIds| (0..100).map(|_| ids.next().to_string()).collect::<BTreeSet<_>>();
        let a = of(&a);
        let again = of(&again);
        let b = of(&b);
        assert_eq!(a.len(), 100);
        assert_eq!(a, again);
        assert!(a.is_disjoint(&b));
    }

    #[test]
    fn a_valid_id_of_a_client_is_kept() {
        let with = |id: &'static str| HeaderMap::from_iter([(HEADER.parse().unwrap(), id.parse().unwrap())]);
        assert_eq!(ids(1).of(&with("mine-7")).as_str(), "mine-7");
        assert_eq!(ids(1).of(&with("a b")).as_str().len(), 26);
        assert_eq!(ids(1).of(&HeaderMap::new()).as_str().len(), 26);
    }
}
