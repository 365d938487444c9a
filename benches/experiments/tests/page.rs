//! Equality of the tables in `docs/experiments.md` and the records in `figures.json`. To write the tables again:
//!
//! ```text
//! BLESS=1 cargo test -p millrace-experiments --test page
//! ```

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use millrace_experiments::all;
use millrace_experiments::figures::Status;
use millrace_experiments::statuses::{StatusRecord, committed};

/// The lines between which the page has the generated tables.
const MARKS: (&str, &str) =
    ("<!-- The tables are generated. -->\n", "<!-- Here the generated tables end. -->\n");

fn is_order(record: &StatusRecord) -> bool {
    record.source == "order"
}

fn counts(records: &[StatusRecord], orders: bool) -> String {
    let mut by_status = BTreeMap::<&str, usize>::new();
    for record in records.iter().filter(|it| is_order(it) == orders) {
        *by_status.entry(&record.status).or_default() += 1;
    }
    by_status.iter().map(|(status, count)| format!("{count} {status}")).collect::<Vec<_>>().join(", ")
}

/// Returns a link to an experiment's report.
fn linked(id: &str) -> String {
    format!("[{id}](experiments/{id}.md)")
}

fn tables(records: &[StatusRecord]) -> String {
    let mut text = format!("Figures: {}.\n\n", counts(records, false));
    text += "| experiment | figure | claim | ours (95% of the mean) | status |\n|---|---|---|---|---|\n";
    for it in records.iter().filter(|it| !is_order(it)) {
        let status = match Status::named(&it.status).unwrap() {
            failed @ (Status::NotReproduced | Status::Missed) => format!("**{}**", failed.name()),
            other => other.name().to_owned(),
        };
        writeln!(
            text,
            "| {} | {} | {} | {} | {status} |",
            linked(&it.experiment),
            it.figure,
            it.claim,
            it.shown
        )
        .unwrap();
    }
    write!(text, "\nOrders: {}. Those that are not shown:\n\n", counts(records, true)).unwrap();
    text += "| experiment | order | status |\n|---|---|---|\n";
    let shown = Status::Shown.name();
    for it in records.iter().filter(|it| is_order(it) && it.status != shown) {
        writeln!(text, "| {} | {} | {} |", linked(&it.experiment), it.figure, it.status).unwrap();
    }
    text
}

#[test]
fn the_page_has_the_recorded_statuses() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let path = docs.join("experiments.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let start = page.find(MARKS.0).unwrap() + MARKS.0.len();
    let end = page.find(MARKS.1).unwrap();
    let wanted = format!("\n{}\n", tables(&committed().unwrap()));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, format!("{}{wanted}{}", &page[..start], &page[end..])).unwrap();
        return;
    }
    assert!(page[start..end] == wanted, "{} differs from figures.json: run with BLESS=1", path.display());
    for experiment in all() {
        let report = docs.join(format!("experiments/{}.md", experiment.id));
        assert!(report.exists(), "{} does not exist", report.display());
    }
}

#[test]
fn each_recorded_figure_has_one_known_experiment_and_one_name() {
    let records = committed().unwrap();
    let mut names: Vec<_> = records.iter().map(|it| (&it.experiment, &it.figure)).collect();
    names.sort_unstable();
    let all_names = names.len();
    names.dedup();
    assert_eq!(names.len(), all_names, "two records have one name");
    for record in &records {
        assert!(all().iter().any(|it| it.id == record.experiment), "{record:?}");
        assert!(Status::named(&record.status).is_some(), "{record:?}");
    }
}
