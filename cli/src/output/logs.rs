//! Log lines of other processes, for people and programs.

use std::collections::BTreeMap;

use millrace_client::log::{Level, Line};
use serde::Serialize;

use crate::output::text::moment;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LogLineDocument<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    level: &'static str,
    process: &'a str,
    seq: u64,
    target: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<&'a str, &'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    trace_id: &'a str,
}

impl<'a> From<&'a Line> for LogLineDocument<'a> {
    fn from(line: &'a Line) -> Self {
        Self {
            time: line.time.and_then(moment),
            level: word(line.level()),
            process: &line.process,
            seq: line.seq,
            target: &line.target,
            message: &line.message,
            fields: line.fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect(),
            trace_id: &line.trace_id,
        }
    }
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Unspecified => "-",
        Level::Trace => "TRACE",
        Level::Debug => "DEBUG",
        Level::Info => "INFO",
        Level::Warn => "WARN",
        Level::Error => "ERROR",
    }
}

/// Formats a log line with the name of its process.
pub(crate) fn line(line: &Line) -> String {
    let LogLineDocument { time, level, process, target, message, fields, trace_id, .. } =
        LogLineDocument::from(line);
    let time = time.unwrap_or_else(|| "-".to_owned());
    let fields: String = fields.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    let trace = if trace_id.is_empty() { String::new() } else { format!(" trace={trace_id}") };
    format!("{time}  {level:<5}  {process:<14}  {target}: {message}{fields}{trace}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_names_its_process() {
        let of = Line {
            seq: 4,
            time: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            level: Level::Warn.into(),
            process: "worker-1".into(),
            target: "millrace_worker::start".into(),
            message: "worker started".into(),
            fields: [("gpus".to_owned(), "4".to_owned())].into(),
            trace_id: "ab".into(),
        };
        let expected = "2023-11-14T22:13:20Z  WARN   worker-1        millrace_worker::start: worker started gpus=4 trace=ab\n";
        assert_eq!(line(&of), expected);
        let json = serde_json::to_value(LogLineDocument::from(&of)).unwrap();
        assert_eq!((&json["fields"]["gpus"], &json["traceId"]), (&"4".into(), &"ab".into()));
    }
}
