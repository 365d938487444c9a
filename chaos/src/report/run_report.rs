//! The report of a run, with the checks, the timeline and the measurements.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::check::{CheckVerdict, PromiseCheck};
use super::cluster_usage::ClusterUsage;
use super::series::RequestSeries;
use crate::timeline::{EventSource, TimelineEvent};

/// Maximum number of shown lines of a failed check's evidence.
pub(super) const EVIDENCE_LINES: usize = 60;

/// The report of a whole run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunReport {
    /// The name of the scenario.
    pub scenario: String,
    /// The description of the scenario, in a line.
    pub about: String,
    /// The seed of the random choices: `--seed` with this number repeats the choices.
    pub seed: u64,
    /// The command that repeats the run with the same choices.
    pub again: String,
    pub verdict: CheckVerdict,
    /// The reason why the run was skipped, or could not be carried out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub checks: Vec<PromiseCheck>,
    /// The faults, other actions and observations, in order.
    pub timeline: Vec<TimelineEvent>,
    /// The results of requests, second by second.
    pub requests: RequestSeries,
    /// The resources of the processes, second by second.
    pub taken: Vec<ClusterUsage>,
    /// The duration of the run.
    #[serde(rename = "tookMs", serialize_with = "crate::timeline::millis")]
    pub took: Duration,
    /// The folder with the processes' data and logs, if the folder was kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
}

impl RunReport {
    /// Returns the empty report of a run.
    #[must_use]
    pub fn begin(scenario: &str, about: &str, seed: u64, again: String) -> Self {
        Self {
            scenario: scenario.to_owned(),
            about: about.to_owned(),
            seed,
            again,
            verdict: CheckVerdict::Skipped,
            reason: None,
            checks: Vec::new(),
            timeline: Vec::new(),
            requests: RequestSeries::default(),
            taken: Vec::new(),
            took: Duration::ZERO,
            kept: None,
        }
    }

    #[must_use]
    pub fn faults(&self) -> usize {
        self.timeline.iter().filter(|event| event.kind == EventSource::Fault).count()
    }

    /// Returns the checks and the verdict as text. The timeline was printed during the run.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in &self.checks {
            let PromiseCheck { name, verdict, detail, evidence } = check;
            let _always = writeln!(text, "{verdict}  {name:width$}  {detail}");
            for line in evidence.iter().take(EVIDENCE_LINES) {
                let _always = writeln!(text, "      {line}");
            }
            if let Some(more) = evidence.len().checked_sub(EVIDENCE_LINES).filter(|&more| more > 0) {
                let _always = writeln!(text, "      and {more} lines more: see -o json");
            }
        }
        if let Some(kept) = &self.kept {
            let _always = writeln!(text, "kept: {kept}");
        }
        let reason = self.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let _always = write!(text, "{} {} --seed {}{reason}", self.verdict, self.scenario, self.seed);
        text
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns the report of a run with a kept and a broken promise.
    pub(in crate::report) fn failed(evidence: Vec<String>) -> RunReport {
        let checks =
            vec![PromiseCheck::pass("one", "1 of 1"), PromiseCheck::fail("second", "0 of 1", evidence)];
        let again = "millrace-chaos run leader-kill --seed 7".to_owned();
        let report = RunReport::begin("leader-kill", "kill -9 the leader", 7, again);
        RunReport { verdict: CheckVerdict::Fail, checks, took: Duration::from_secs(3), ..report }
    }

    #[test]
    fn evidence_is_shown_under_its_check_and_shortened() {
        let evidence = (0..EVIDENCE_LINES + 2).map(|line| format!("line {line}")).collect();
        let text = failed(evidence).text();
        assert!(text.starts_with("PASS  one     1 of 1\nFAIL  second  0 of 1\n      line 0\n"), "{text}");
        assert!(text.ends_with("and 2 lines more: see -o json\nFAIL leader-kill --seed 7"), "{text}");
    }
}
