//! A check that each experiment runs, on a part of its workload. Figures are not judged.

use millrace_experiments::{Effort, all};

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
