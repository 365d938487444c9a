//! Replication outages: logs once when a member has received nothing from this leader for [`AWAY`], and
//! once when the member is reachable again. openraft reports each failed call, many times a second.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The length of an outage before the first log message: a restart is shorter.
const AWAY: Duration = Duration::from_secs(2);
/// The longest gap between two failed calls of the same outage. After a longer gap, another leader may
/// have reached the member.
const OF_ONE_OUTAGE: Duration = Duration::from_secs(10);

/// The outages of all members. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct ReplicationOutages(Arc<Mutex<OutagesByMember>>);

/// Outages by member, for members whose last call failed.
#[derive(Debug, Default)]
struct OutagesByMember(BTreeMap<u64, Outage>);

/// An outage of one member.
#[derive(Debug, Clone, Copy)]
struct Outage {
    since: Instant,
    last: Instant,
    told: bool,
}

impl OutagesByMember {
    /// Records a failed call. Returns the outage's length if the outage is to be logged now.
    fn failed(&mut self, now: Instant, member: u64) -> Option<Duration> {
        let new = Outage { since: now, last: now, told: false };
        let outage = self.0.entry(member).or_insert(new);
        if now.duration_since(outage.last) > OF_ONE_OUTAGE {
            *outage = new;
        }
        outage.last = now;
        let lasts = now.duration_since(outage.since);
        (lasts >= AWAY && !std::mem::replace(&mut outage.told, true)).then_some(lasts)
    }

    /// Records an answered call. Returns the outage's length if a logged outage ends now.
    fn answered(&mut self, now: Instant, member: u64) -> Option<Duration> {
        let outage = self.0.remove(&member)?;
        let was_told = outage.told && now.duration_since(outage.last) <= OF_ONE_OUTAGE;
        was_told.then(|| now.duration_since(outage.since))
    }
}

/// A call without an answer yet. Dropping it counts as a failure.
#[derive(Debug)]
pub(super) struct ReplicationCall<'a> {
    silences: &'a ReplicationOutages,
    member: u64,
    address: &'a str,
    error: Option<String>,
    is_answered: bool,
}

impl ReplicationOutages {
    /// Begins a call.
    pub(super) fn call<'a>(&'a self, member: u64, address: &'a str) -> ReplicationCall<'a> {
        ReplicationCall { silences: self, member, address, error: None, is_answered: false }
    }

    fn members(&self) -> MutexGuard<'_, OutagesByMember> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReplicationCall<'_> {
    /// Records the call's answer or error.
    pub(super) fn ended<T>(mut self, outcome: &Result<T, tonic::Status>) {
        match outcome {
            Ok(_) => self.is_answered = true,
            Err(status) => self.error = Some(status.message().to_owned()),
        }
    }
}

impl Drop for ReplicationCall<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        let controller = self.member;
        let address = self.address;
        if self.is_answered {
            let was_away = self.silences.members().answered(now, controller);
            if let Some(away) = was_away {
                tracing::info!(controller, address, ?away, "the log reaches a controller again");
            }
            return;
        }
        let is_away = self.silences.members().failed(now, controller);
        if let Some(away) = is_away {
            let error = self.error.as_deref().unwrap_or("no answer in time");
            tracing::warn!(controller, address, ?away, error, "the log does not reach a controller");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_and_its_end_are_reported_once() {
        let mut members = OutagesByMember::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(members.answered(at(0), 2), None);
        assert_eq!(members.failed(at(0), 2), None);
        assert_eq!(members.failed(at(1_000), 2), None, "the member may be restarting");
        assert_eq!(members.failed(at(2_000), 3), None, "another member");
        assert_eq!(members.failed(at(2_000), 2), Some(AWAY));
        assert_eq!(members.failed(at(2_100), 2), None);
        assert_eq!(members.answered(at(5_000), 2), Some(Duration::from_secs(5)));
        assert_eq!(members.answered(at(5_100), 2), None);
    }

    #[test]
    fn a_short_outage_or_an_outage_across_another_leadership_is_not_reported() {
        let mut members = OutagesByMember::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(members.failed(at(0), 2), None);
        assert_eq!(members.answered(at(1_900), 2), None);
        assert_eq!(members.failed(at(2_000), 2), None, "a new outage");
        assert_eq!(members.failed(at(4_000), 2), Some(AWAY));
        // This controller did not lead for an hour.
        assert_eq!(members.failed(at(3_600_000), 2), None);
        assert_eq!(members.failed(at(3_602_000), 2), Some(AWAY));
        assert_eq!(members.answered(at(7_200_000), 2), None);
    }
}
