//! The metrics that the files in `deploy/compose/telemetry` read, and their runbook.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::running::{RunningCluster, repository};

const DASHBOARD: &str = "deploy/compose/telemetry/grafana/dashboards/millrace.json";
const ALERTS: &str = "deploy/compose/telemetry/alerts.yaml";

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap()
}

/// Returns the names of Millrace's metrics in a text.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("millrace_")).map(str::to_owned).collect()
}

pub(crate) fn metrics(server: &str) -> String {
    scrape(server, "text/plain")
}

/// Returns the metrics in a format of the scraper's choice, with the response's headers.
pub(crate) fn scrape(server: &str, accept: &str) -> String {
    let mut stream = TcpStream::connect(server).unwrap();
    let lines = ["GET /metrics HTTP/1.1", &format!("Host: {server}"), &format!("Accept: {accept}")];
    write!(stream, "{}\r\nConnection: close\r\n\r\n", lines.join("\r\n")).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_dashboard_and_the_alerts_read_only_existing_metrics() {
    let up = RunningCluster::ephemeral(&[]);
    up.apply_digits();
    up.ok(&["invoke", "digits", "--image", &repository("examples/digits/images/digit-3.png")]);
    let worker = up.ready["workers"][0].as_str().unwrap();
    let there_are = &names(&metrics(&up.client)) | &names(&metrics(worker));
    for file in [DASHBOARD, ALERTS] {
        let asked = names(&read(file));
        assert!(!asked.is_empty(), "{file} reads no metric");
        let unknown: Vec<_> = asked.difference(&there_are).collect();
        assert!(unknown.is_empty(), "{file} reads {unknown:?}, but there are {there_are:?}");
    }
}

#[test]
fn every_alert_has_a_heading_in_the_runbook() {
    let alerts = read(ALERTS);
    let runbook = read("docs/operate/runbooks.md");
    let values = |key: &str| -> Vec<String> {
        let values = alerts.lines().filter_map(|line| line.trim().strip_prefix(key));
        values.map(|value| value.trim().to_owned()).collect()
    };
    let names = values("- alert:");
    let links: Vec<_> =
        names.iter().map(|name| format!("docs/operate/runbooks.md#{}", name.to_lowercase())).collect();
    assert_eq!(values("runbook_url:"), links);
    let headings: Vec<_> = runbook.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert_eq!(headings, names);
}
