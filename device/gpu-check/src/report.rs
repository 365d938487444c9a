//! The result of a check, as a line of JSON, as text on a terminal, and as a part of a page.

use std::fmt::Write as _;

use millrace_device::check::{Findings, Value, Verdict};
use serde::{Deserialize, Serialize};

/// The result of a check.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CheckReport {
    pub(crate) number: u8,
    pub(crate) name: String,
    pub(crate) decides: String,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) verdict: Verdict,
    #[serde(flatten)]
    pub(crate) findings: Findings,
}

impl CheckReport {
    /// Returns the result as text for a terminal.
    pub(crate) fn summary(&self) -> String {
        let mut text = format!(
            "{:>3}  {} ({:.1} s): {}\n",
            self.number,
            self.name,
            self.seconds,
            verdict(&self.verdict)
        );
        for value in &self.findings.values {
            let marks = if value.as_expected() == Some(false) { " !" } else { "" };
            let judged = judged(value).map_or(String::new(), |judged| format!(" ({judged})"));
            writeln!(text, "     {}: {}{judged}{marks}", value.name, amount(value)).expect("a string");
        }
        for note in &self.findings.notes {
            writeln!(text, "     {note}").expect("a string");
        }
        text
    }
}

/// Returns the page of all results.
pub(crate) fn page(reports: &[CheckReport]) -> String {
    let mut text = String::from("# Results of gpu-check\n");
    for report in reports {
        let CheckReport { number, name, decides, seconds, .. } = report;
        writeln!(
            text,
            "\n## {number}. {name}\n\nDecides {decides}. Took {seconds:.1} s: {}.\n",
            verdict(&report.verdict)
        )
        .expect("a string");
        if !report.findings.values.is_empty() {
            text.push_str("| value | measured | part of the ceiling | expected | as expected |\n");
            text.push_str("|---|---|---|---|---|\n");
        }
        for value in &report.findings.values {
            let ratio = value.ratio().map_or(String::new(), |ratio| format!("{ratio:.2}"));
            let expected = value
                .expected
                .map_or(String::new(), |range| format!("{} to {}", short(range.least), short(range.most)));
            let as_expected = value.as_expected().map_or("", |met| if met { "yes" } else { "**no**" });
            writeln!(text, "| {} | {} | {ratio} | {expected} | {as_expected} |", value.name, amount(value))
                .expect("a string");
        }
        for note in &report.findings.notes {
            writeln!(text, "\n{note}").expect("a string");
        }
    }
    text
}

fn verdict(verdict: &Verdict) -> String {
    match verdict {
        Verdict::AsExpected => "as expected".to_owned(),
        Verdict::Surprising => "some values are not as expected".to_owned(),
        Verdict::Failed(reason) => format!("FAILED: {reason}"),
    }
}

fn amount(value: &Value) -> String {
    format!("{} {}", short(value.value), value.unit).trim().to_owned()
}

/// Returns the ratio and the expectation of a value.
fn judged(value: &Value) -> Option<String> {
    let ratio =
        value.ratio().map(|ratio| format!("{ratio:.2} of {}", value.ceiling.map_or(String::new(), short)));
    let expected =
        value.expected.map(|range| format!("expected {} to {}", short(range.least), short(range.most)));
    match (ratio, expected) {
        (Some(ratio), Some(expected)) => Some(format!("{ratio}, {expected}")),
        (ratio, expected) => ratio.or(expected),
    }
}

/// Returns a number with three significant digits, or all digits of a whole number.
fn short(value: f64) -> String {
    if value == value.trunc() && value.abs() < 1e9 {
        return format!("{value}");
    }
    let digits = 2 - value.abs().log10().floor() as i32;
    format!("{value:.*}", digits.clamp(0, 4) as usize)
}
