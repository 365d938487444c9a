//! The reports of some runs as JUnit XML, for CI servers: a suite for each run and a case for each
//! check. A run that was skipped or failed to run has a further case with the reason.

use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::check::{CheckVerdict, PromiseCheck};
use super::run_report::RunReport;

pub(super) fn render(reports: &[RunReport]) -> anyhow::Result<String> {
    let mut junit = quick_junit::Report::new("millrace-chaos");
    junit.set_time(reports.iter().map(|report| report.took).sum::<Duration>());
    junit.add_test_suites(reports.iter().map(suite));
    Ok(junit.to_string()?)
}

fn suite(report: &RunReport) -> TestSuite {
    let mut suite = TestSuite::new(report.scenario.as_str());
    suite.set_time(report.took);
    let seed = report.seed.to_string();
    suite.add_property(("seed", seed.as_str()));
    suite.add_property(("again", report.again.as_str()));
    if let Some(reason) = &report.reason {
        suite.add_test_case(case(report, "it is carried out", status(report.verdict, reason, &[])));
    }
    for PromiseCheck { name, verdict, detail, evidence } in &report.checks {
        let mut case = case(report, name, status(*verdict, detail, evidence));
        case.set_system_out(detail.as_str());
        suite.add_test_case(case);
    }
    suite
}

fn case(report: &RunReport, name: &str, status: TestCaseStatus) -> TestCase {
    let mut case = TestCase::new(name, status);
    case.set_classname(format!("chaos.{}", report.scenario));
    case
}

fn status(verdict: CheckVerdict, said: &str, evidence: &[String]) -> TestCaseStatus {
    let mut status = match verdict {
        CheckVerdict::Pass => return TestCaseStatus::success(),
        CheckVerdict::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        CheckVerdict::Skipped => TestCaseStatus::skipped(),
    };
    status.set_message(said);
    if !evidence.is_empty() {
        status.set_description(evidence.join("\n"));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::run_report::tests::failed;

    #[test]
    fn a_failed_check_is_a_failed_case_and_a_skipped_run_a_skipped_one() {
        let skipped = RunReport {
            verdict: CheckVerdict::Skipped,
            reason: Some("no <tmpfs>".into()),
            checks: Vec::new(),
            ..failed(Vec::new())
        };
        let xml = render(&[failed(vec!["a & b".into()]), skipped]).unwrap();
        for expected in [
            r#"<testsuites name="millrace-chaos" tests="3" skipped="1" failures="1" errors="0" time="6.000">"#,
            r#"<property name="seed" value="7"/>"#,
            r#"<testcase name="one" classname="chaos.leader-kill">"#,
            r#"<failure message="0 of 1">a &amp; b</failure>"#,
            r#"<skipped message="no &lt;tmpfs&gt;"/>"#,
        ] {
            assert!(xml.contains(expected), "{expected} in {xml}");
        }
    }
}
