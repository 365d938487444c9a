//! A check that each experiment runs, on a part of its workload, and a comparison of short experiments with
//! the recorded statuses.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::thread::{available_parallelism, scope};

use millrace_experiments::{Effort, Experiment, all, statuses};

#[test]
fn every_experiment_reports_finite_figures_for_a_part_of_its_workload() {
    let waiting = Mutex::new(all().into_iter());
    let next = || waiting.lock().unwrap().next();
    let work = || std::iter::from_fn(next).for_each(|experiment| reports_finite_figures(&experiment));
    let threads = available_parallelism().map_or(1, NonZeroUsize::get);
    scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
}

fn reports_finite_figures(experiment: &Experiment) {
    let report =
        (experiment.run)(Effort::SHORT).unwrap_or_else(|error| panic!("{}: {error:#}", experiment.id));
    let rows: usize = report.tables.iter().map(|(_, _, rows)| rows.len()).sum();
    assert!(rows > 0 && !report.assumed.is_empty(), "{}: {report:?}", experiment.id);
    let mut figures = report.figures.iter().flat_map(|figure| &figure.ours.0);
    assert!(figures.all(|value| value.is_finite()), "{}: {report:?}", experiment.id);
    let text = report.markdown(experiment.id, experiment.title, false);
    assert!(text.starts_with(&format!("## {}: ", experiment.id)), "{text}");
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
