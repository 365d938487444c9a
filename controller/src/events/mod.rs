//! Events of the cluster for operators, as this controller observed them: the last [`KEPT_MAX`] events,
//! in memory.
//!
//! Events are the differences between two snapshots of the cluster ([`picture`]), taken every
//! [`LOOK_EVERY`]. A change that is undone between two snapshots yields an event only if a counter
//! shows the change (epochs, incarnations). Each controller keeps the events that it observed itself.
//! Controllers see the same change within a moment of each other, so a reader that switches controllers
//! continues by time.

mod event;
mod picture;

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::UnixMillis;
use millrace_proto::admin as api;
use millrace_proto::convert::timestamp_wire;
use millrace_proto::pages::PageBudget;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use self::event::{Event, Severity};
use self::picture::{ObservedCluster, between};
use crate::clock::WallClock;
use crate::fleet::WorkerFleet;
use crate::leadership::LeaderStatus;
use crate::raft::Replica;

/// The number of stored events.
pub(crate) const KEPT_MAX: usize = 4096;
/// The interval between two snapshots of the cluster.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The overlap for a reader from another controller, in milliseconds before the reader's last
/// event. The controllers' clocks and snapshots differ, and a repeated event is better than a missing
/// one.
const OVERLAP_MS: u64 = 5_000;

/// A reader's position: the last event that the reader got, the process that numbered the event, and
/// the time of the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventPosition {
    process: u64,
    seq: u64,
    at: UnixMillis,
}

impl fmt::Display for EventPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{}.{}", self.process, self.seq, self.at.0)
    }
}

impl FromStr for EventPosition {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.splitn(3, '.');
        let mut part = || parts.next().ok_or(());
        let process = u64::from_str_radix(part()?, 16).map_err(drop)?;
        let seq = part()?.parse().map_err(drop)?;
        Ok(Self { process, seq, at: UnixMillis(part()?.parse().map_err(drop)?) })
    }
}

#[derive(Debug, Clone)]
struct StoredEvent {
    seq: u64,
    at: UnixMillis,
    event: Event,
}

/// The stored events of this process. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct ClusterEventLog {
    /// A random id of this process, different in each process of the same controller.
    process: u64,
    kept: watch::Sender<VecDeque<StoredEvent>>,
}

/// A page of events for a reader.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EventPage {
    pub(crate) events: Vec<api::Event>,
    /// The position after this page.
    pub(crate) next: EventPosition,
    /// Events between the reader's position and this page that are no longer stored.
    pub(crate) missed: u64,
}

impl ClusterEventLog {
    /// Returns an empty store. `process` must be random for each process.
    pub(crate) fn new(process: u64) -> Self {
        Self { process, kept: watch::Sender::default() }
    }

    fn add(&self, at: UnixMillis, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        self.kept.send_modify(|kept| {
            for event in events {
                let seq = kept.back().map_or(0, |last| last.seq) + 1;
                if kept.len() == KEPT_MAX {
                    kept.pop_front();
                }
                kept.push_back(StoredEvent { seq, at, event });
            }
        });
    }

    /// Returns the events after a reader's position, at most `max` and at most a page. Without a
    /// position, the page starts at the oldest event. For a position of another process, the page
    /// starts [`OVERLAP_MS`] before the position's time.
    pub(crate) fn after(&self, token: Option<EventPosition>, max: usize) -> EventPage {
        let kept = self.kept.borrow();
        let after = EventFilter::of(token, self.process);
        let mut room = PageBudget::default();
        let wanted = kept.iter().filter(|it| after.wants(it)).take(max);
        let wanted = wanted.map(|it| (it, shown(it))).take_while(|(_, shown)| room.take(shown));
        let (events, shown): (Vec<_>, Vec<_>) = wanted.unzip();
        let first = kept.front().map_or(0, |first| first.seq);
        let missed = if after.ours { first.saturating_sub(after.seq.saturating_add(1)) } else { 0 };
        let (seq, at) = match (events.last(), token) {
            (Some(last), _) => (last.seq, last.at),
            (None, Some(token)) if after.ours => (token.seq, token.at),
            // No stored event is for this reader, so the next position is after all stored events.
            (None, _) => kept.back().map_or((0, after.since), |last| (last.seq, last.at)),
        };
        let next = EventPosition { process: self.process, seq, at };
        EventPage { events: shown, next, missed }
    }

    /// Waits until an event after a reader's position arrives, or until the timeout.
    pub(crate) async fn wait(&self, token: EventPosition, timeout: Duration) {
        let after = EventFilter::of(Some(token), self.process);
        let mut news = self.kept.subscribe();
        let there = news.wait_for(|kept| kept.back().is_some_and(|last| after.wants(last)));
        // The caller reads the events in both cases.
        drop(tokio::time::timeout(timeout, there).await);
    }
}

/// The filter of the events after a reader's position.
#[derive(Debug, Clone, Copy)]
struct EventFilter {
    /// Whether this process numbered the reader's last event.
    ours: bool,
    seq: u64,
    since: UnixMillis,
}

impl EventFilter {
    fn of(token: Option<EventPosition>, process: u64) -> Self {
        match token {
            None => Self { ours: false, seq: 0, since: UnixMillis(0) },
            Some(token) if token.process == process => {
                Self { ours: true, seq: token.seq, since: UnixMillis(0) }
            }
            Some(token) => {
                Self { ours: false, seq: 0, since: UnixMillis(token.at.0.saturating_sub(OVERLAP_MS)) }
            }
        }
    }

    fn wants(&self, kept: &StoredEvent) -> bool {
        kept.seq > self.seq && kept.at >= self.since
    }
}

fn shown(kept: &StoredEvent) -> api::Event {
    let severity = match kept.event.severity {
        Severity::Normal => api::EventSeverity::Normal,
        Severity::Warning => api::EventSeverity::Warning,
    };
    api::Event {
        time: Some(timestamp_wire(kept.at.0)),
        severity: severity.into(),
        reason: kept.event.reason.to_owned(),
        object: kept.event.object.clone(),
        message: kept.event.message.clone(),
    }
}

/// The task that observes the cluster, with its data sources.
#[derive(Debug)]
pub(crate) struct EventRecorder {
    pub(crate) events: ClusterEventLog,
    pub(crate) replica: Replica,
    pub(crate) fleet: WorkerFleet,
    pub(crate) outlook: LeaderStatus,
    pub(crate) clock: Arc<dyn WallClock>,
}

impl EventRecorder {
    /// Takes snapshots until stopped. The first snapshot yields no events, except a warning about the
    /// policy.
    pub(crate) async fn run_until(self, stop: CancellationToken) {
        let look = async {
            let mut ticks = tokio::time::interval(LOOK_EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut before = ObservedCluster::of(&self.replica, &self.fleet, &self.outlook, None);
            self.events.add(self.clock.now(), before.policy_warning().into_iter().collect());
            loop {
                ticks.tick().await;
                let after = ObservedCluster::of(&self.replica, &self.fleet, &self.outlook, Some(&before));
                self.events.add(self.clock.now(), between(&before, &after));
                before = after;
            }
        };
        // The result is `None` after a stop, because the loop has no other end.
        stop.run_until_cancelled(look).await;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(number: u64) -> Event {
        let object = "cluster".to_owned();
        let message = number.to_string();
        Event { severity: Severity::Normal, reason: "Test", object, message }
    }

    fn messages(page: &EventPage) -> Vec<&str> {
        page.events.iter().map(|event| event.message.as_str()).collect()
    }

    #[test]
    fn a_reader_continues_after_its_last_event() {
        let events = ClusterEventLog::new(7);
        assert_eq!(events.after(None, 9).events, []);
        events.add(UnixMillis(10), vec![event(1), event(2), event(3)]);
        let first = events.after(None, 2);
        assert_eq!(messages(&first), ["1", "2"]);
        let token = first.next.to_string().parse().unwrap();
        let second = events.after(Some(token), 9);
        assert_eq!((messages(&second), second.missed), (vec!["3"], 0));
        assert_eq!(events.after(Some(second.next), 9).next, second.next, "nothing new");
    }

    #[test]
    fn a_reader_that_was_away_for_too_long_gets_the_number_of_missed_events() {
        let events = ClusterEventLog::new(7);
        events.add(UnixMillis(10), vec![event(0)]);
        let token = events.after(None, 9).next;
        events.add(UnixMillis(11), (0..KEPT_MAX as u64 + 2).map(event).collect());
        let page = events.after(Some(token), 1);
        assert_eq!((page.missed, messages(&page)), (2, vec!["2"]));
    }

    #[test]
    fn a_reader_from_another_controller_continues_by_time() {
        let events = ClusterEventLog::new(7);
        events.add(UnixMillis(10_000), vec![event(1)]);
        events.add(UnixMillis(20_000), vec![event(2)]);
        let elsewhere = EventPosition { process: 8, seq: 500, at: UnixMillis(20_500) };
        let page = events.after(Some(elsewhere), 9);
        assert_eq!((messages(&page), page.missed), (vec!["2"], 0), "events of the overlap are repeated");
        // The other controller's clock is ahead of this controller's.
        let late = EventPosition { at: UnixMillis(60_000), ..elsewhere };
        let page = events.after(Some(late), 9);
        assert_eq!(page.events, []);
        events.add(UnixMillis(21_000), vec![event(3)]);
        assert_eq!(messages(&events.after(Some(page.next), 9)), ["3"], "later events arrive");
    }

    #[test]
    fn malformed_tokens_are_refused() {
        for bad in ["", "x", "1.2", "1.2.x", "g.1.1"] {
            assert_eq!(bad.parse::<EventPosition>(), Err(()), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_token_is_answered_with_a_token_that_parses(
            process in 7..9u64,
            seq in prop_oneof![0..5u64, Just(u64::MAX), any::<u64>()],
            at in prop_oneof![0..20u64, Just(u64::MAX), any::<u64>()],
            max in 0..5usize,
        ) {
            let events = ClusterEventLog::new(7);
            events.add(UnixMillis(10), vec![event(1), event(2), event(3)]);
            let text = EventPosition { process, seq, at: UnixMillis(at) }.to_string();
            let page = events.after(Some(text.parse().unwrap()), max);
            prop_assert!(page.events.len() <= max);
            prop_assert_eq!(page.next.to_string().parse::<EventPosition>(), Ok(page.next));
        }

        #[test]
        fn any_text_is_a_token_or_is_refused(text in "[0-9a-f.]{0,60}|.{0,200}") {
            if let Ok(token) = text.parse::<EventPosition>() {
                prop_assert_eq!(token.to_string().parse::<EventPosition>(), Ok(token));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_an_event_until_its_timeout() {
        let events = ClusterEventLog::new(7);
        let token = events.after(None, 1).next;
        events.wait(token, Duration::from_secs(5)).await;
        let waiting = tokio::spawn({
            let events = events.clone();
            async move { events.wait(token, Duration::from_secs(3600)).await }
        });
        tokio::task::yield_now().await;
        events.add(UnixMillis(10), vec![event(1)]);
        waiting.await.unwrap();
    }
}
