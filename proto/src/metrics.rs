//! Metrics as text, in the format that the scraper asks for. OpenMetrics is the format in which
//! they are written. Prometheus's older text format is the default, for example for curl and
//! `promtool check metrics`. The older format differs in the names of counters in HELP and TYPE
//! lines and in the lines for units and the end, and has no exemplars.

use std::time::Duration;

use bytes::Bytes;
use http::header::ACCEPT;
use http::{HeaderMap, HeaderValue};

/// The beginning of an exemplar. Inside a label its quote would be escaped.
const EXEMPLAR: &str = " # {trace_id=\"";
const OPEN_METRICS: &str = "application/openmetrics-text";

/// A snapshot of the metrics in both formats. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MetricsPage {
    open_metrics: Bytes,
    prometheus: Bytes,
}

impl MetricsPage {
    /// The minimum interval between two snapshots of a server. Earlier scrapes wait for the
    /// interval to end.
    pub const EVERY: Duration = Duration::from_millis(200);

    /// Creates a page from OpenMetrics text.
    #[must_use]
    pub fn new(open_metrics: String) -> Self {
        let prometheus = prometheus_text(&open_metrics).into();
        Self { open_metrics: open_metrics.into(), prometheus }
    }

    /// Returns the content type and the text for a scrape with these headers.
    #[must_use]
    pub fn negotiated(&self, headers: &HeaderMap) -> (HeaderValue, Bytes) {
        let accepts = |value: &HeaderValue| value.to_str().is_ok_and(|text| text.contains(OPEN_METRICS));
        if headers.get_all(ACCEPT).iter().any(accepts) {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            return (HeaderValue::from_static(kind), self.open_metrics.clone());
        }
        (HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"), self.prometheus.clone())
    }
}

fn prometheus_text(open_metrics: &str) -> String {
    let counters = open_metrics.lines().filter_map(|line| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        (kind == "counter").then_some(name)
    });
    let counters: std::collections::HashSet<&str> = counters.collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        let about = ["# HELP ", "# TYPE "].into_iter().find(|prefix| line.starts_with(prefix));
        let named = about.and_then(|prefix| Some((prefix, line[prefix.len()..].split_once(' ')?)));
        match named {
            Some((prefix, (name, rest))) if counters.contains(name) => {
                text.push_str(&format!("{prefix}{name}_total {rest}\n"));
            }
            None if line.starts_with("# UNIT ") || line == "# EOF" => {}
            None => {
                text.push_str(line.split_once(EXEMPLAR).map_or(line, |(sample, _)| sample));
                text.push('\n');
            }
            Some(_) => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "\
# HELP requests Requests finished.
# TYPE requests counter
requests_total{reason=\"OK\"} 3
# HELP memory_bytes Memory.
# TYPE memory_bytes gauge
# UNIT memory_bytes bytes
memory_bytes 7
# HELP took_seconds Took.
# TYPE took_seconds histogram
# UNIT took_seconds seconds
took_seconds_bucket{le=\"0.1\",of=\"a # {trace_id=\\\"b\"} 2 # {trace_id=\"5ca1ab1e\"} 0.05 12.5
# EOF
";

    #[test]
    fn a_scraper_that_accepts_open_metrics_gets_open_metrics() {
        let accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.4";
        let headers = HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]);
        let (kind, text) = MetricsPage::new(WRITTEN.to_owned()).negotiated(&headers);
        assert!(kind.to_str().unwrap().starts_with(OPEN_METRICS));
        assert_eq!(text, WRITTEN);
    }

    #[test]
    fn other_scrapers_get_counters_under_their_total_names() {
        let (kind, text) = MetricsPage::new(WRITTEN.to_owned()).negotiated(&HeaderMap::new());
        assert!(kind.to_str().unwrap().starts_with("text/plain"));
        let expected = "\
# HELP requests_total Requests finished.
# TYPE requests_total counter
requests_total{reason=\"OK\"} 3
# HELP memory_bytes Memory.
# TYPE memory_bytes gauge
memory_bytes 7
# HELP took_seconds Took.
# TYPE took_seconds histogram
took_seconds_bucket{le=\"0.1\",of=\"a # {trace_id=\\\"b\"} 2
";
        assert_eq!(text, expected);
    }
}
