//! The reports of some runs as a self-contained page for a browser: a summary, and the plots,
//! checks and timeline of each run.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::chart;
use super::check::{CheckVerdict, PromiseCheck};
use super::harness_usage::HarnessUsage;
use super::run_report::{EVIDENCE_LINES, RunReport};
use crate::timeline::{EventSource, TimelineEvent, seconds};

/// Maximum number of shown events of a run: a long storm has thousands.
const EVENTS_MAX: usize = 2_000;
const STYLE: &str = include_str!("report.css");

pub(super) fn render(reports: &[RunReport], own: &[HarnessUsage]) -> anyhow::Result<String> {
    let runs = reports.iter().enumerate().map(|(at, report)| run(at, report));
    let runs = runs.collect::<anyhow::Result<Vec<_>>>()?;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { "millrace-chaos: " (heading(reports)) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "Chaos report" }
                    p { (heading(reports)) }
                }
                main {
                    (summary(reports, own))
                    @for run in &runs { (run) }
                }
            }
        }
    };
    Ok(page.into_string())
}

fn heading(reports: &[RunReport]) -> String {
    let count = |verdict| reports.iter().filter(|report| report.verdict == verdict).count();
    let passed = count(CheckVerdict::Pass);
    let failed = count(CheckVerdict::Fail);
    let skipped = match count(CheckVerdict::Skipped) {
        0 => String::new(),
        skipped => format!(", {skipped} skipped"),
    };
    format!("{passed} passed, {failed} failed{skipped}")
}

fn summary(reports: &[RunReport], own: &[HarnessUsage]) -> Markup {
    html! {
        section {
            h2 { "Runs" }
            table .summary {
                thead {
                    tr {
                        th { "verdict" } th { "scenario" } th .number { "seed" } th .number { "took" }
                        th .number { "faults" } th .number { "requests" } th .number { "tried again" }
                        th .number { "lost or wrong" } th .number { "p50" } th .number { "p99" }
                        th .number { "slowest" }
                    }
                }
                tbody {
                    @for (at, report) in reports.iter().enumerate() {
                        @let total = &report.requests.total;
                        tr {
                            td { (pill(report.verdict)) }
                            td { a href=(format!("#run-{at}")) { (report.scenario) } }
                            td .number { (report.seed) }
                            td .number { (format!("{:.0} s", report.took.as_secs_f64())) }
                            td .number { (report.faults()) }
                            td .number { (total.ended()) }
                            td .number { (total.retried) }
                            td .number .bad[total.lost > 0] { (total.lost) }
                            td .number { (millis(total.p50_ms)) }
                            td .number { (millis(total.p99_ms)) }
                            td .number { (millis(total.max_ms)) }
                        }
                    }
                }
            }
            @if let (Some(first), Some(last)) = (own.first(), own.last()) {
                p .note {
                    "The harness itself had " (first) " after its first run, " (last) " after its last, "
                    (seconds(last.at - first.at)) " later."
                }
            }
        }
    }
}

fn run(at: usize, report: &RunReport) -> anyhow::Result<Markup> {
    let plots = match report.requests.seconds.is_empty() {
        true => html! {},
        false => html! {
            h3 { "How long requests took" span .note { "each red line is a fault" } }
            figure { (PreEscaped(chart::latency(report)?)) }
            h3 { "How requests ended" }
            figure { (PreEscaped(chart::outcomes(report)?)) }
            @if !report.taken.is_empty() {
                h3 { "Memory and descriptors of the processes" }
                figure { (PreEscaped(chart::memory(report)?)) }
                figure { (PreEscaped(chart::descriptors(report)?)) }
            }
        },
    };
    Ok(html! {
        section id=(format!("run-{at}")) {
            h2 { (report.scenario) " " (pill(report.verdict)) }
            p { (report.about) "." }
            @if let Some(reason) = &report.reason { p .reason { (reason) } }
            p { "Again: " code { (report.again) } }
            @if let Some(kept) = &report.kept { p { "Logs: " code { (kept) } } }
            @if !report.checks.is_empty() { (checks(&report.checks)) }
            (plots)
            @if !report.timeline.is_empty() { (timeline(&report.timeline)) }
        }
    })
}

fn checks(checks: &[PromiseCheck]) -> Markup {
    html! {
        h3 { "Checks" }
        table {
            tbody {
                @for PromiseCheck { name, verdict, detail, evidence } in checks {
                    tr {
                        td { (pill(*verdict)) }
                        td .promise { (name) }
                        td {
                            (detail)
                            @if !evidence.is_empty() {
                                details open { summary { "evidence" } (lines(evidence)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn lines(evidence: &[String]) -> Markup {
    let more = evidence.len().saturating_sub(EVIDENCE_LINES);
    html! {
        pre {
            @for line in evidence.iter().take(EVIDENCE_LINES) { (line) "\n" }
            @if more > 0 { "and " (more) " lines more" }
        }
    }
}

fn timeline(events: &[TimelineEvent]) -> Markup {
    let more = events.len().saturating_sub(EVENTS_MAX);
    html! {
        details {
            summary { "Timeline, " (events.len()) " events" }
            table .timeline {
                tbody {
                    @for TimelineEvent { at, kind, what } in events.iter().take(EVENTS_MAX) {
                        tr class=(class(*kind)) {
                            td .number { (seconds(*at)) }
                            td { (what) }
                        }
                    }
                }
            }
            @if more > 0 { p { "and " (more) " events more" } }
        }
    }
}

fn class(kind: EventSource) -> &'static str {
    match kind {
        EventSource::Fault => "fault",
        EventSource::Did => "did",
        EventSource::Saw => "saw",
    }
}

fn pill(verdict: CheckVerdict) -> Markup {
    let class = match verdict {
        CheckVerdict::Pass => "pass",
        CheckVerdict::Fail => "fail",
        CheckVerdict::Skipped => "skipped",
    };
    html! { span class=(format!("pill {class}")) { (verdict.to_string()) } }
}

fn millis(ms: f64) -> String {
    if ms >= 1e3 { format!("{:.2} s", ms / 1e3) } else { format!("{ms:.1} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::run_report::tests::failed;
    use crate::report::{RequestSecond, RequestSeries};

    #[test]
    fn a_page_fetches_nothing_and_escapes_its_contents() {
        let page = render(&[failed(vec!["<script>1</script>".into()])], &[]).unwrap();
        assert!(page.contains("&lt;script&gt;1"), "{page}");
        assert!(page.contains("0 passed, 1 failed"), "{page}");
        for outside in ["src=", "href=\"http", "@import", "url("] {
            assert!(!page.contains(outside), "{outside} in {page}");
        }
    }

    #[test]
    fn a_run_with_requests_has_both_plots() {
        let second = RequestSecond {
            at: 1,
            answered: 5,
            p50_ms: 3.0,
            p99_ms: 9.0,
            max_ms: 9.0,
            ..RequestSecond::default()
        };
        let requests = RequestSeries { seconds: vec![second], total: second };
        let page = render(&[RunReport { requests, ..failed(Vec::new()) }], &[]).unwrap();
        assert_eq!(page.matches("<svg").count(), 2, "{page}");
    }
}
