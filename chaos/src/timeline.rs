//! The timeline of a run: the harness's actions and observations in order, each with its time since
//! the start.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::clock;

/// The source of an event: a fault or another action of the harness, or an observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventSource {
    /// The harness injected a fault.
    Fault,
    /// The harness made a repair or started a process.
    Did,
    /// The harness observed the cluster.
    Saw,
}

/// An entry of a timeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TimelineEvent {
    /// Time since the start of the timeline.
    #[serde(rename = "atMs", serialize_with = "millis")]
    pub at: Duration,
    pub kind: EventSource,
    /// The description in words.
    pub what: String,
}

pub(crate) fn millis<S: serde::Serializer>(at: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u128(at.as_millis())
}

impl fmt::Display for TimelineEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            EventSource::Fault => "fault",
            EventSource::Did => "did",
            EventSource::Saw => "saw",
        };
        write!(f, "{:>9.3} s  {kind:5}  {}", self.at.as_secs_f64(), self.what)
    }
}

/// The destination of new events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventOutput {
    /// Standard output, one line per event.
    Print,
    /// No destination: the report contains the events.
    Silent,
}

/// The timeline of a run, which clones share.
#[derive(Debug, Clone)]
pub struct Timeline {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    begun: Instant,
    echo: EventOutput,
    events: Mutex<Vec<TimelineEvent>>,
}

impl Timeline {
    /// Starts a timeline now.
    #[must_use]
    pub fn begin(echo: EventOutput) -> Self {
        Self { shared: Arc::new(Shared { begun: clock::now(), echo, events: Mutex::default() }) }
    }

    /// Returns the time since the start, which every record of the run uses.
    #[must_use]
    pub fn now(&self) -> Duration {
        clock::now() - self.shared.begun
    }

    /// Records a fault that the harness injects.
    pub fn fault(&self, what: impl Into<String>) {
        self.note(EventSource::Fault, what.into());
    }

    /// Records another action of the harness.
    pub fn did(&self, what: impl Into<String>) {
        self.note(EventSource::Did, what.into());
    }

    /// Records an observation.
    pub fn saw(&self, what: impl Into<String>) {
        self.note(EventSource::Saw, what.into());
    }

    fn note(&self, kind: EventSource, what: String) {
        let event = TimelineEvent { at: self.now(), kind, what };
        if self.shared.echo == EventOutput::Print {
            println!("{event}");
        }
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Returns every event so far.
    #[must_use]
    pub fn events(&self) -> Vec<TimelineEvent> {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Formats a duration in seconds, for timelines and checks.
pub(crate) fn seconds(span: Duration) -> String {
    format!("{:.2} s", span.as_secs_f64())
}
