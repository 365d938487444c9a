//! What was done to the cluster and what was seen of it, in order, each with its time since the start.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::clock;

/// Whether the harness broke or did it, or the cluster showed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A fault.
    Fault,
    /// A repair, a start.
    Did,
    /// What followed.
    Saw,
}

/// One line of a timeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Since the timeline began.
    #[serde(rename = "atMs", serialize_with = "millis")]
    pub at: Duration,
    /// By whom.
    pub kind: Kind,
    /// In words.
    pub what: String,
}

pub(crate) fn millis<S: serde::Serializer>(at: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u128(at.as_millis())
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Fault => "fault",
            Kind::Did => "did",
            Kind::Saw => "saw",
        };
        write!(f, "{:>9.3} s  {kind:5}  {}", self.at.as_secs_f64(), self.what)
    }
}

/// Where events go as they happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Echo {
    /// To standard output, a line each.
    Print,
    /// Nowhere: the report has them.
    Silent,
}

/// The timeline of one run. Clones share it.
#[derive(Debug, Clone)]
pub struct Timeline {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    begun: Instant,
    echo: Echo,
    events: Mutex<Vec<Event>>,
}

impl Timeline {
    /// Begins now.
    #[must_use]
    pub fn begin(echo: Echo) -> Self {
        Self { shared: Arc::new(Shared { begun: clock::now(), echo, events: Mutex::default() }) }
    }

    /// How long it has been going on: the time of every record of the run.
    #[must_use]
    pub fn now(&self) -> Duration {
        clock::now() - self.shared.begun
    }

    /// Notes what was broken.
    pub fn fault(&self, what: impl Into<String>) {
        self.note(Kind::Fault, what.into());
    }

    /// Notes what was done besides.
    pub fn did(&self, what: impl Into<String>) {
        self.note(Kind::Did, what.into());
    }

    /// Notes what was seen.
    pub fn saw(&self, what: impl Into<String>) {
        self.note(Kind::Saw, what.into());
    }

    fn note(&self, kind: Kind, what: String) {
        let event = Event { at: self.now(), kind, what };
        if self.shared.echo == Echo::Print {
            println!("{event}");
        }
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Everything noted so far.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A duration in seconds, as timelines and checks print it.
pub(crate) fn seconds(span: Duration) -> String {
    format!("{:.2} s", span.as_secs_f64())
}
