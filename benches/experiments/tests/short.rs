//! A check that each experiment runs, on a part of its workload, and a comparison of short experiments with
//! the recorded statuses.

#![allow(clippy::unwrap_used)]

use millrace_experiments::{Effort, all, statuses};

#[test]
fn every_experiment_reports_finite_figures_for_a_part_of_its_workload() {
    for experiment in all() {
        let report =
            (experiment.run)(Effort::SHORT).unwrap_or_else(|error| panic!("{}: {error:#}", experiment.id));
        let rows: usize = report.tables.iter().map(|(_, _, rows)| rows.len()).sum();
        assert!(rows > 0 && !report.assumed.is_empty(), "{}: {report:?}", experiment.id);
        let mut figures = report.figures.iter().flat_map(|figure| &figure.ours.0);
        assert!(figures.all(|value| value.is_finite()), "{}: {report:?}", experiment.id);
        let text = report.markdown(experiment.id, experiment.title, false);
        assert!(text.starts_with(&format!("## {}: ", experiment.id)), "{text}");
    }
}

/// The chosen experiments take less than a second each with ten seeds in a debug build.
#[test]
fn short_experiments_have_their_recorded_statuses_with_all_seeds() {
    let committed = statuses::committed().unwrap();
    for id in ["H13", "H26", "PACK"] {
        let experiment = all().into_iter().find(|it| it.id == id).unwrap();
        let report = (experiment.run)(Effort::FULL).unwrap();
        assert_eq!(
            statuses::differences(id, &report, Effort::FULL, &committed).unwrap(),
            Vec::<String>::new()
        );
    }
}
