//! Events for people and programs.

use millrace_client::messages as wire;
use serde::Serialize;

use crate::output::text::moment;

/// A cluster event as a document.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EventDocument<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) time: Option<String>,
    severity: &'static str,
    pub(crate) reason: &'a str,
    pub(crate) object: &'a str,
    pub(crate) message: &'a str,
}

impl<'a> From<&'a wire::Event> for EventDocument<'a> {
    fn from(event: &'a wire::Event) -> Self {
        Self {
            time: event.time.and_then(moment),
            severity: match event.severity() {
                wire::EventSeverity::Warning => "Warning",
                wire::EventSeverity::Normal | wire::EventSeverity::Unspecified => "Normal",
            },
            reason: &event.reason,
            object: &event.object,
            message: &event.message,
        }
    }
}

/// Formats an event with fixed columns that fit most events, because later events are unknown.
pub(crate) fn line(event: &wire::Event) -> String {
    let EventDocument { time, severity, reason, object, message } = EventDocument::from(event);
    let time = time.unwrap_or_else(|| "-".to_owned());
    format!("{time:<20}  {severity:<7}  {reason:<17}  {object:<24}  {message}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_printed_as_one_line() {
        let event = wire::Event {
            time: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            severity: wire::EventSeverity::Warning.into(),
            reason: "ExecutorRestarted".into(),
            object: "gpu/worker-1/0".into(),
            message: "its executor died".into(),
        };
        let expected =
            "2023-11-14T22:13:20Z  Warning  ExecutorRestarted  gpu/worker-1/0            its executor died\n";
        assert_eq!(line(&event), expected);
        let json = serde_json::to_value(EventDocument::from(&event)).unwrap();
        assert_eq!((&json["severity"], &json["time"]), (&"Warning".into(), &"2023-11-14T22:13:20Z".into()));
    }
}
